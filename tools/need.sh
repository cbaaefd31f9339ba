#!/bin/sh
# need.sh COMMAND=PACKAGE...: install the Debian packages whose command is missing, or print their names.
missing=
for pair in "$@"; do
    command -v "${pair%%=*}" > /dev/null 2>&1 || missing="$missing ${pair#*=}"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null 2>&1; then
    echo "missing:$missing. Install it (on Debian: sudo apt-get install$missing) and try again." >&2
    exit 1
fi
echo "== installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get install -y -qq --no-install-recommends $missing > /dev/null 2>&1 ||
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing > /dev/null; }
