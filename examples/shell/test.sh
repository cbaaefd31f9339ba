#!/bin/sh
# Tests handler.sh as a process in a lab. Needs curl, jq and forewarn.
set -eu
for program in curl jq forewarn; do
    command -v "$program" > /dev/null || { echo "$program is not on the PATH"; exit 1; }
done
cd "$(dirname "$0")"
folder=$(mktemp -d)

start_lab() {
    forewarn lab serve --port 0 --control-port 0 --ready-file "$folder/lab.json" > "$folder/lab.log" 2>&1 &
    lab=$!
    until_true "test -f $folder/lab.json" 300
    control=$(jq -r .control "$folder/lab.json")/api/v1
}

start_handler() {
    ENDPOINT=$(jq -r '.vms["web-0"]' "$folder/lab.json") HEALTHY="$folder/healthy" DRAIN_SECONDS=0 PERIOD_SECONDS=0.1 \
        sh handler.sh > "$folder/handler.log" 2>&1 &
    handler=$!
    until_true "test -f $folder/healthy"
}

end() {
    kill ${handler:-} ${lab:-} || true
    wait
    rm -r "$folder"
}

fail() {
    echo "not ok - $(echo "${test:-}" | tr _ ' '): $1"
    tail -n 5 "$folder"/*.log
    if [ -n "${control:-}" ]; then
        echo "==> the lab's transcript"
        FOREWARN_CONTROL=${control%/api/v1} forewarn lab transcript | tail -n 5
    fi
    exit 1
}

# until_true COMMAND [TRIES]: wait up to TRIES tenths of a second
until_true() {
    for _ in $(seq "${2:-50}"); do
        if eval "$1"; then return; fi
        sleep 0.1
    done
    fail "timed out waiting for: $1"
}

# api METHOD PATH [BODY]
api() {
    curl --silent --noproxy '*' --request "$1" --header 'Content-Type: application/json' ${3:+--data "$3"} "$control$2"
}

maintain() {
    api POST "/hosts/$1/maintain" '{"type": "Reboot"}' | jq -r '.events[] | select(.scope == "web").id'
}

# event ID: its status and approvals, such as "Started web-0", or how it ended
event() {
    api GET "/events/$1" | jq -r '.facts.how // (.status + " " + (.approvals | join(" ")))'
}

advance() {
    api POST /clock/advance "{\"seconds\": $1}" > "$folder/clock.json"
}

# count_logged TEXT: how many lines of the handler's log contain it
count_logged() {
    grep -c "$1" "$folder/handler.log" || true
}

count_polls() {
    api GET '/transcript?limit=10000' | jq '[.entries[] | select(.kind == "request" and .vm == "web-0")] | length'
}

# wait_for_polls: until the handler has seen the current document
wait_for_polls() {
    before=$(count_polls)
    until_true '[ "$(count_polls)" -ge $((before + 2)) ]'
}

test_reboot_is_approved_after_draining_and_work_resumes_afterwards() {
    id=$(maintain host-a)
    until_true '[ "$(event "$id")" = "Started web-0" ]'
    [ ! -e "$folder/healthy" ] || fail "approved while the balancer still sends work"
    advance 900
    [ "$(event "$id")" = completed ] || fail "the reboot should be over, but is: $(event "$id")"
    until_true "test -f $folder/healthy"
}

test_events_of_another_vm_are_ignored() {
    id=$(maintain host-b)
    wait_for_polls
    [ "$(event "$id")" = "Scheduled " ] || fail "another VM's event was approved: $(event "$id")"
    [ -e "$folder/healthy" ] || fail "drained for another VM's event"
    advance 900
    [ "$(event "$id")" = "Started " ] || fail "at NotBefore it should start, but is: $(event "$id")"
    advance 900
}

test_failed_poll_is_retried_and_does_not_end_the_event() {
    id=$(maintain host-a)
    until_true '[ "$(event "$id")" = "Started web-0" ]'
    resumed=$(count_logged 'accepting work')
    api POST /faults '{"fault": "status", "code": 410, "vms": ["web-0"], "requests": 3}' > "$folder/fault.json"
    until_true '[ "$(count_logged "error: 410")" = 3 ]'
    wait_for_polls
    [ "$(count_logged 'accepting work')" = "$resumed" ] || fail "took a 410 for the end of the reboot"
    advance 900
    until_true "test -f $folder/healthy"
}

trap end EXIT
trap 'exit 1' INT TERM
start_lab
start_handler
for test in $(sed -n 's/^\(test_[a-z_]*\)() {$/\1/p' test.sh); do
    $test
    echo "ok - $test" | tr _ ' '
done
