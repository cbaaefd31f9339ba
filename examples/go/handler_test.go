// Tests the handler in a lab: events on demand, and a clock that the test moves. `go test`
package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

const (
	gone     = `{"fault": "status", "code": 410, "vms": ["web-0"], "requests": 1}`
	readyMax = 30 * time.Second
)

func TestRebootIsApprovedAfterDrainingAndWorkResumesAfterwards(t *testing.T) {
	id := maintain(t, "host-a")
	handler, done := newHandler()
	handler.Drain = func() { *done = append(*done, "drained while "+event(t, id).Status) }

	expect(t, handler.Poll(), nil)
	expect(t, *done, []string{"drained while Scheduled"})
	expect(t, event(t, id), ControlEvent{Status: "Started", Approvals: []string{"web-0"}})

	advance(t, 15*time.Minute)
	expect(t, event(t, id), ControlEvent{Ended: "completed"})
	expect(t, handler.Poll(), nil)
	expect(t, *done, []string{"drained while Scheduled", "resumed"})
}

func TestEventsOfAnotherVmAreIgnored(t *testing.T) {
	id := maintain(t, "host-b")
	handler, done := newHandler()

	expect(t, handler.Poll(), nil)
	expect(t, event(t, id), ControlEvent{Status: "Scheduled", Approvals: []string{}})
	expect(t, *done, []string{})

	advance(t, 15*time.Minute)
	expect(t, event(t, id), ControlEvent{Status: "Started", Approvals: []string{}})
}

func TestFailedPollIsRetriedAndDoesNotEndTheEvent(t *testing.T) {
	id := maintain(t, "host-a")
	handler, done := newHandler()

	api(t, "POST", "/faults", gone, nil)
	expect(t, handler.Poll() != nil, true)
	expect(t, handler.Poll(), nil)
	expect(t, event(t, id).Approvals, []string{"web-0"})

	api(t, "POST", "/faults", gone, nil)
	expect(t, handler.Poll() != nil, true)
	expect(t, *done, []string{"drained"})
}

func newHandler() (*Handler, *[]string) {
	done := []string{}
	record := func(what string) func() { return func() { done = append(done, what) } }
	return &Handler{Endpoint: lab.Vms["web-0"], Drain: record("drained"), Resume: record("resumed")}, &done
}

func expect(t *testing.T, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("got %+v, want %+v", got, want)
	}
}

// The lab is a child process. Its ready file has the URLs; docs/lab.md has the API.
var lab struct {
	Control string
	Vms     map[string]string // requests to this URL come from that VM
}

func TestMain(m *testing.M) { os.Exit(inLab(m.Run)) }

func inLab(run func() int) int {
	folder, err := os.MkdirTemp("", "lab-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(folder)
	ready := filepath.Join(folder, "ready.json")
	command := exec.Command("forewarn", "lab", "serve", "--port=0", "--control-port=0", "--ready-file="+ready)
	command.Stderr = os.Stderr
	if err := command.Start(); err != nil {
		panic(err)
	}
	defer command.Wait()
	defer command.Process.Kill()
	for end := time.Now().Add(readyMax); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if content, err := os.ReadFile(ready); err == nil && json.Unmarshal(content, &lab) == nil {
			return run()
		}
	}
	fmt.Fprintf(os.Stderr, "%s did not appear within %s\n", ready, readyMax)
	return 1
}

// ControlEvent is an event in the control API.
type ControlEvent struct {
	ID, Scope, Status, Ended string
	Approvals                []string
}

// maintain schedules a reboot of a host and returns the id of the event for the web servers. It ends with the test.
func maintain(t *testing.T, host string) string {
	t.Helper()
	t.Cleanup(func() { advance(t, time.Hour) })
	var result struct{ Events []ControlEvent }
	api(t, "POST", "/hosts/"+host+"/maintain", `{"type": "Reboot"}`, &result)
	for _, event := range result.Events {
		if event.Scope == "web" {
			return event.ID
		}
	}
	t.Fatalf("no event for the web servers: %+v", result)
	return ""
}

func event(t *testing.T, id string) ControlEvent {
	t.Helper()
	var result struct {
		Status    string
		Approvals []string
		Facts     struct{ How string }
	}
	api(t, "GET", "/events/"+id, "", &result)
	return ControlEvent{Status: result.Status, Approvals: result.Approvals, Ended: result.Facts.How}
}

func advance(t *testing.T, duration time.Duration) {
	t.Helper()
	api(t, "POST", "/clock/advance", fmt.Sprintf(`{"seconds": %g}`, duration.Seconds()), nil)
}

func api(t *testing.T, method, path, body string, result any) {
	t.Helper()
	request, err := http.NewRequest(method, lab.Control+"/api/v1"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if result != nil {
		if err := json.NewDecoder(response.Body).Decode(result); err != nil {
			t.Fatal(err)
		}
	}
}
