#!/bin/sh
# Takes this VM out of a load balancer before something happens to it, and puts it back when that is over.
# The balancer sends work as long as the file $HEALTHY exists. Needs curl and jq; runs until it is stopped.
set -u
ENDPOINT=${ENDPOINT:-${FOREWARN_ENDPOINT:-http://169.254.169.254}}    # `forewarn lab run` sets the second
HEALTHY=${HEALTHY:-/run/healthy}
DRAIN_SECONDS=${DRAIN_SECONDS:-5}      # so long may a request that is under way take
PERIOD_SECONDS=${PERIOD_SECONDS:-1}
approved=
EVENTS="$ENDPOINT/metadata/scheduledevents?api-version=2020-07-01"

# No proxy knows the endpoint. An answer other than 200 is a failure: nothing follows from it, the next look may succeed.
ask() {
    curl --silent --show-error --fail --noproxy '*' --max-time 10 --header Metadata:true "$@"
}

# The name that Resources have for this VM. It is not the hostname.
own_name() {
    ask "$ENDPOINT/metadata/instance/compute/name?api-version=2021-02-01&format=text"
}

# One line for each event that names us: all VMs of an availability set see one document. jq -e fails where there is no document.
ours() {
    jq -er --arg name "$NAME" '.Events | map(select(.Resources | index($name)) | "\(.EventStatus) \(.EventId)") | join("\n")'
}

drain() {
    if [ -e "$HEALTHY" ]; then
        rm "$HEALTHY"
        echo "draining"
        sleep "$DRAIN_SECONDS"
    fi
}

resume() {
    if [ ! -e "$HEALTHY" ]; then
        touch "$HEALTHY"
        approved=
        echo "taking work"
    fi
}

# Once: an approved event may still have to wait, for its turn or for the word of others.
approve() {
    case $approved in *"$1"*) return ;; esac
    ask "$EVENTS" --data "{\"StartRequests\": [{\"EventId\": \"$1\"}]}" || return
    approved="$approved $1"
    echo "approved $1"
}

look() {
    document=$(ask "$EVENTS") || return
    events=$(printf '%s' "$document" | ours) || return
    if [ -z "$events" ]; then
        resume
        return
    fi
    drain
    for id in $(echo "$events" | sed -n 's/^Scheduled //p'); do
        approve "$id"
    done
}

until NAME=${NAME:-$(own_name)} && [ -n "$NAME" ]; do
    sleep "$PERIOD_SECONDS"
done
echo "watching over $NAME"
while :; do
    look
    sleep "$PERIOD_SECONDS"
done
