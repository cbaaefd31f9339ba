// Drains a service before an event of its VM, approves the event, and resumes afterwards.
// Standard library only. `go run .` runs it on a real VM, here or on Azure.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"sync/atomic"
	"time"
)

const (
	eventsPath = "/metadata/scheduledevents?api-version=2020-07-01"
	namePath   = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
	bytesMax   = 1 << 20
)

// The endpoint is link-local, so no proxy can reach it.
var client = &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{Proxy: nil}}

// Event is an event in the document.
type Event struct {
	EventID     string `json:"EventId"`
	EventStatus string
	EventType   string
	NotBefore   string
	Resources   []string
}

// Handler drains before an event of its VM and resumes after it. Without a Name, it is read from the endpoint.
type Handler struct {
	Endpoint, Name string
	Drain, Resume  func()
	isDrained      bool
	approved       map[string]bool
}

// Poll polls once and reacts. An error changes nothing; the next poll may succeed.
func (h *Handler) Poll() error {
	if h.Name == "" { // the name in Resources, not the hostname
		name, err := h.request(http.MethodGet, namePath, nil)
		if err != nil {
			return err
		}
		h.Name = string(name)
	}
	body, err := h.request(http.MethodGet, eventsPath, nil)
	if err != nil {
		return err
	}
	var document struct{ Events *[]Event }
	if err := json.Unmarshal(body, &document); err != nil {
		return err
	}
	if document.Events == nil {
		return fmt.Errorf("a document without Events: %s", body)
	}
	return h.react(*document.Events)
}

func (h *Handler) react(events []Event) error {
	isConcerned := false
	for _, event := range events {
		if !h.concerns(event) {
			continue
		}
		isConcerned = true
		if !h.isDrained {
			log.Printf("%s is scheduled, not before %q: draining", event.EventType, event.NotBefore)
			h.Drain()
			h.isDrained, h.approved = true, map[string]bool{}
		}
		if event.EventStatus == "Scheduled" {
			if err := h.approve(event); err != nil {
				return err
			}
		}
	}
	if !isConcerned && h.isDrained {
		h.Resume()
		h.isDrained = false
		log.Print("the event is over: accepting work again")
	}
	return nil
}

// All VMs of an availability set see one document; only events that name this VM count.
func (h *Handler) concerns(event Event) bool {
	for _, name := range event.Resources {
		if name == h.Name {
			return true
		}
	}
	return false
}

// Approve only once: an approved event may stay Scheduled until other VMs approve or another update domain is done.
func (h *Handler) approve(event Event) error {
	if h.approved[event.EventID] {
		return nil
	}
	body, err := json.Marshal(map[string]any{"StartRequests": []map[string]string{{"EventId": event.EventID}}})
	if err != nil {
		return err
	}
	if _, err := h.request(http.MethodPost, eventsPath, body); err != nil {
		return err
	}
	h.approved[event.EventID] = true
	log.Printf("approved %s %s", event.EventType, event.EventID)
	return nil
}

func (h *Handler) request(method, path string, body []byte) ([]byte, error) {
	req, err := http.NewRequest(method, h.Endpoint+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Metadata", "true")
	response, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s %s failed with %s", method, path, response.Status)
	}
	return io.ReadAll(io.LimitReader(response.Body, bytesMax))
}

func main() {
	var isDraining atomic.Bool
	go http.ListenAndServe(":3000", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if isDraining.Load() { // for the health check of a load balancer
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	handler := Handler{Endpoint: "http://169.254.169.254"}
	for _, name := range []string{"FOREWARN_ENDPOINT", "ENDPOINT"} { // `forewarn lab run` sets the first
		if value := os.Getenv(name); value != "" {
			handler.Endpoint = value
		}
	}
	handler.Drain = func() { isDraining.Store(true); time.Sleep(5 * time.Second) } // requests in progress finish
	handler.Resume = func() { isDraining.Store(false) }
	for ; ; time.Sleep(time.Second) { // until the process is stopped
		if err := handler.Poll(); err != nil {
			log.Print(err)
		}
	}
}
