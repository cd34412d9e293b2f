#!/bin/sh
# Installs mlxr for the user who runs it: an environment of its own below ~/.local/share, and the command in ~/.local/bin.
#
#   sh deploy/install.sh SOURCE [SHA256]    SOURCE: a wheel (file or https address), or a folder with the sources
#   sh deploy/install.sh --remove           takes the environment and the command away; models stay
#
# MLXR_HOME and MLXR_BIN name other places, MLXR_EXTRAS more to install, such as cuda. Nothing is changed as root.
set -eu

home=${MLXR_HOME:-${XDG_DATA_HOME:-$HOME/.local/share}/mlxr/environment}
bin=${MLXR_BIN:-$HOME/.local/bin}

fail() {
  echo "install.sh: $1" >&2
  exit 1
}

find_python() {
  for name in python3.13 python3.12 python3.11 python3; do
    if command -v "$name" >/dev/null 2>&1 &&
      "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$name"
      return
    fi
  done
  fail "mlxr needs Python 3.11 or newer with venv (Debian: apt install python3-venv; macOS: brew install python)"
}

check_sum() {
  sum=$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$1")
  [ "$sum" = "$2" ] || fail "$1 has the SHA-256 $sum, not $2; nothing was installed"
}

main() {
  if [ "${1:-}" = --remove ]; then
    rm -rf "$home"
    rm -f "$bin/mlxr"
    echo "mlxr is removed; models stay where they are"
    return
  fi
  [ $# -ge 1 ] || fail "no release is published yet; give a wheel or a folder with the sources (make wheel builds one)"
  source=$1
  python=$(find_python)
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  case $source in
    https://*)
      file=$scratch/${source##*/}
      curl --proto '=https' --tlsv1.2 -fsSL -o "$file" "$source" || fail "$source could not be fetched"
      source=$file
      ;;
    http://*) fail "$source is not fetched without TLS; use https" ;;
  esac
  [ -e "$source" ] || fail "there is no $source"
  if [ $# -ge 2 ]; then check_sum "$source" "$2"; fi
  # What was there before comes back unless the new environment works.
  mkdir -p "$(dirname "$home")" "$bin"
  rm -rf "$home.old"
  if [ -e "$home" ]; then mv "$home" "$home.old"; fi
  trap 'rm -rf "$scratch"; if [ -e "$home.old" ]; then rm -rf "$home"; mv "$home.old" "$home"; fi' EXIT
  "$python" -m venv "$home"
  "$home/bin/python" -m pip install --quiet --disable-pip-version-check "$source${MLXR_EXTRAS:+[$MLXR_EXTRAS]}" ||
    fail "pip could not install $source; its message is above"
  "$home/bin/mlxr" version || fail "what was installed does not run"
  rm -rf "$home.old"
  ln -sf "$home/bin/mlxr" "$bin/mlxr"
  case ":$PATH:" in
    *":$bin:"*) ;;
    *) echo "add $bin to PATH to call mlxr by its name" ;;
  esac
}

main "$@"
