// What the handler owes its VM, tested in a lab: events on demand, and a clock that the test moves. `go test`
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

func TestARebootIsApprovedWhenDrainedAndWorkGoesOnWhenItIsOver(t *testing.T) {
	id := maintain(t, "host-a")
	handler, done := newHandler()
	handler.Drain = func() { *done = append(*done, "drained while "+event(t, id).Status) }

	expect(t, handler.Look(), nil)
	expect(t, *done, []string{"drained while Scheduled"})
	expect(t, event(t, id), Seen{Status: "Started", Approvals: []string{"web-0"}})

	advance(t, 15*time.Minute)
	expect(t, event(t, id), Seen{Ended: "completed"})
	expect(t, handler.Look(), nil)
	expect(t, *done, []string{"drained while Scheduled", "resumed"})
}

func TestWhatBefallsTheNeighbourIsLeftToTheNeighbour(t *testing.T) {
	id := maintain(t, "host-b")
	handler, done := newHandler()

	expect(t, handler.Look(), nil)
	expect(t, event(t, id), Seen{Status: "Scheduled", Approvals: []string{}})
	expect(t, *done, []string{})

	advance(t, 15*time.Minute)
	expect(t, event(t, id), Seen{Status: "Started", Approvals: []string{}})
}

func TestAnEndpointThatIsGoneIsAskedAgainAndIsNoAllClear(t *testing.T) {
	id := maintain(t, "host-a")
	handler, done := newHandler()

	api(t, "POST", "/faults", gone, nil)
	expect(t, handler.Look() != nil, true)
	expect(t, handler.Look(), nil)
	expect(t, event(t, id).Approvals, []string{"web-0"})

	api(t, "POST", "/faults", gone, nil)
	expect(t, handler.Look() != nil, true)
	expect(t, *done, []string{"drained"})
}

func newHandler() (*Handler, *[]string) {
	done := []string{}
	note := func(what string) func() { return func() { done = append(done, what) } }
	return &Handler{Endpoint: lab.Vms["web-0"], Drain: note("drained"), Resume: note("resumed")}, &done
}

func expect(t *testing.T, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("got %+v, want %+v", got, want)
	}
}

// The lab is a child process; where it is stands in its ready file, and what it can do in docs/lab.md.
var lab struct {
	Control string
	Vms     map[string]string // whoever calls there is that VM
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
		if told, err := os.ReadFile(ready); err == nil && json.Unmarshal(told, &lab) == nil {
			return run()
		}
	}
	fmt.Fprintf(os.Stderr, "there is no %s after %s\n", ready, readyMax)
	return 1
}

// Seen is an event as the platform sees it.
type Seen struct {
	ID, Scope, Status, Ended string
	Approvals                []string
}

// maintain announces a reboot of a host and gives the id of the event of the web servers. When the test ends it is over.
func maintain(t *testing.T, host string) string {
	t.Helper()
	t.Cleanup(func() { advance(t, time.Hour) })
	var answer struct{ Events []Seen }
	api(t, "POST", "/hosts/"+host+"/maintain", `{"type": "Reboot"}`, &answer)
	for _, event := range answer.Events {
		if event.Scope == "web" {
			return event.ID
		}
	}
	t.Fatalf("no event of the web servers: %+v", answer)
	return ""
}

func event(t *testing.T, id string) Seen {
	t.Helper()
	var answer struct {
		Status    string
		Approvals []string
		Facts     struct{ How string }
	}
	api(t, "GET", "/events/"+id, "", &answer)
	return Seen{Status: answer.Status, Approvals: answer.Approvals, Ended: answer.Facts.How}
}

func advance(t *testing.T, span time.Duration) {
	t.Helper()
	api(t, "POST", "/clock/advance", fmt.Sprintf(`{"seconds": %g}`, span.Seconds()), nil)
}

func api(t *testing.T, method, path, body string, answer any) {
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
	if answer != nil {
		if err := json.NewDecoder(response.Body).Decode(answer); err != nil {
			t.Fatal(err)
		}
	}
}
