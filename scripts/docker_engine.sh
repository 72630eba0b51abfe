#!/usr/bin/env bash
# A private Docker engine for tests: no network, no registry, all of its files below one folder.
#   start [FOLDER]   starts it and prints DOCKER_HOST=unix://FOLDER/docker.sock and DOCKER_ENGINE_FOLDER=FOLDER
#   stop FOLDER      ends it by its process id, unmounts what is left and removes FOLDER
# Needs root and dockerd (apt-get install --no-install-recommends docker.io).
set -euo pipefail

die() {
  echo "docker engine: $1" >&2
  exit 1
}

answers() {
  curl -sf --max-time 2 --unix-socket "$1/docker.sock" http://engine/_ping >/dev/null
}

is_engine() {
  [ -r "/proc/$1/cmdline" ] && tr '\0' ' ' <"/proc/$1/cmdline" | grep -q -- "--pidfile $2/docker.pid"
}

start() {
  local folder=${1:-$(mktemp -d /tmp/docker-engine.XXXXXX)} pid
  [ "$(id -u)" -eq 0 ] || die "needs root, got user id $(id -u); run it as root"
  command -v dockerd >/dev/null || die "no dockerd; apt-get install --no-install-recommends docker.io"
  command -v curl >/dev/null || die "no curl; apt-get install curl"
  mkdir -p "$folder"
  # Left by an engine that was killed: dockerd waits for a containerd that is gone.
  rm -f "$folder/docker.pid" "$folder/exec/containerd/containerd.pid"
  setsid dockerd --host "unix://$folder/docker.sock" --pidfile "$folder/docker.pid" \
    --data-root "$folder/data" --exec-root "$folder/exec" \
    --bridge=none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false \
    >"$folder/dockerd.log" 2>&1 </dev/null &
  pid=$!
  for _ in $(seq 300); do
    if answers "$folder"; then
      echo "DOCKER_HOST=unix://$folder/docker.sock"
      echo "DOCKER_ENGINE_FOLDER=$folder"
      return
    fi
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  tail -5 "$folder/dockerd.log" >&2
  stop "$folder"
  die "did not start; its last lines are above"
}

stop() {
  local folder=${1:?stop needs the folder that start printed} pid mount
  pid=$(cat "$folder/docker.pid" 2>/dev/null || true)
  if [ -n "$pid" ] && is_engine "$pid" "$folder"; then
    kill "$pid"
    for _ in $(seq 200); do
      is_engine "$pid" "$folder" || break
      sleep 0.1
    done
    if is_engine "$pid" "$folder"; then kill -9 "$pid"; fi
  fi
  # Deepest first.
  awk -v below="$folder/" 'index($2, below) == 1 { print $2 }' /proc/self/mounts | sort -r | while read -r mount; do
    umount -l "$mount" || true
  done
  case "$folder" in
    */docker-engine.*) rm -rf "$folder" ;;
    *) echo "docker engine: $folder is kept, since another program made it" >&2 ;;
  esac
}

case "${1:-}" in
  start) start "${2:-}" ;;
  stop) stop "${2:-}" ;;
  *) die "start or stop is due, got '${1:-}'; see the head of this file" ;;
esac
