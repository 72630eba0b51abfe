"""What MXFP4 costs a model, measured tensor by tensor; the program is `model/calibrate.py`."""
