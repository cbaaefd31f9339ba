#!/bin/sh
# Takes this VM out of a load balancer before an event, and puts it back afterwards.
# The balancer sends work as long as the file $HEALTHY exists. Needs curl and jq; runs until it is stopped.
set -u
ENDPOINT=${ENDPOINT:-${FOREWARN_ENDPOINT:-http://169.254.169.254}}    # `forewarn lab run` sets the second
HEALTHY=${HEALTHY:-/run/healthy}
DRAIN_SECONDS=${DRAIN_SECONDS:-5}      # the longest request
PERIOD_SECONDS=${PERIOD_SECONDS:-1}
approved=
EVENTS="$ENDPOINT/metadata/scheduledevents?api-version=2020-07-01"

# The endpoint is link-local, so no proxy is used. A status other than 200 is an error; the next poll may succeed.
request() {
    curl --silent --show-error --fail --noproxy '*' --max-time 10 --header Metadata:true "$@"
}

# The name of this VM in Resources, not the hostname.
own_name() {
    request "$ENDPOINT/metadata/instance/compute/name?api-version=2021-02-01&format=text"
}

# One line per event that names this VM: all VMs of an availability set see one document. jq -e fails without a document.
own_events() {
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
        echo "accepting work"
    fi
}

# Approve only once: an approved event may stay Scheduled until other VMs approve or another update domain is done.
approve() {
    case $approved in *"$1"*) return ;; esac
    request "$EVENTS" --data "{\"StartRequests\": [{\"EventId\": \"$1\"}]}" || return
    approved="$approved $1"
    echo "approved $1"
}

poll() {
    document=$(request "$EVENTS") || return
    events=$(printf '%s' "$document" | own_events) || return
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
echo "watching events of $NAME"
while :; do
    poll
    sleep "$PERIOD_SECONDS"
done
