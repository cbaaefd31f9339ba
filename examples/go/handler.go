// Keeps a service out of the way of what happens to its VM: it drains before it says "go ahead".
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

// The endpoint is near, and no proxy knows it.
var client = &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{Proxy: nil}}

// Event is what a VM is told.
type Event struct {
	EventID     string `json:"EventId"`
	EventStatus string
	EventType   string
	NotBefore   string
	Resources   []string
}

// Handler drains before an event of its VM and resumes after it. Name is asked for if it is empty.
type Handler struct {
	Endpoint, Name string
	Drain, Resume  func()
	isDrained      bool
	approved       map[string]bool
}

// Look looks once at what is to come, and does what follows. After an error nothing is concluded: the next look may succeed.
func (h *Handler) Look() error {
	if h.Name == "" { // the one that Resources have; it is not the hostname
		name, err := h.ask(http.MethodGet, namePath, nil)
		if err != nil {
			return err
		}
		h.Name = string(name)
	}
	body, err := h.ask(http.MethodGet, eventsPath, nil)
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
			log.Printf("%s ahead, not before %q: draining", event.EventType, event.NotBefore)
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
		log.Print("it is over: taking work again")
	}
	return nil
}

// All VMs of an availability set see one document; what counts is whether our name is in it.
func (h *Handler) concerns(event Event) bool {
	for _, name := range event.Resources {
		if name == h.Name {
			return true
		}
	}
	return false
}

// Once: an approved event may still have to wait, for its turn or for the word of others.
func (h *Handler) approve(event Event) error {
	if h.approved[event.EventID] {
		return nil
	}
	body, err := json.Marshal(map[string]any{"StartRequests": []map[string]string{{"EventId": event.EventID}}})
	if err != nil {
		return err
	}
	if _, err := h.ask(http.MethodPost, eventsPath, body); err != nil {
		return err
	}
	h.approved[event.EventID] = true
	log.Printf("approved %s %s", event.EventType, event.EventID)
	return nil
}

func (h *Handler) ask(method, path string, body []byte) ([]byte, error) {
	request, err := http.NewRequest(method, h.Endpoint+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Metadata", "true")
	answer, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s %s was answered with %s", method, path, answer.Status)
	}
	return io.ReadAll(io.LimitReader(answer.Body, bytesMax))
}

func main() {
	var isDraining atomic.Bool
	go http.ListenAndServe(":3000", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if isDraining.Load() { // what a load balancer's health check asks for
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	handler := Handler{Endpoint: "http://169.254.169.254"}
	for _, name := range []string{"FOREWARN_ENDPOINT", "ENDPOINT"} { // `forewarn lab run` sets the first
		if told := os.Getenv(name); told != "" {
			handler.Endpoint = told
		}
	}
	handler.Drain = func() { isDraining.Store(true); time.Sleep(5 * time.Second) } // requests under way come to their end
	handler.Resume = func() { isDraining.Store(false) }
	for ; ; time.Sleep(time.Second) { // ends when it is stopped
		if err := handler.Look(); err != nil {
			log.Print(err)
		}
	}
}
