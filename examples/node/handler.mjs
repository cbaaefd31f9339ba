// Drains a web application before an event of its VM, approves the event, and resumes afterwards.
// Node 18 or newer, nothing else. `node handler.mjs` runs it on a real VM, here or on Azure.
import { createServer } from "node:http";
import { setTimeout as sleep } from "node:timers/promises";
import { pathToFileURL } from "node:url";

const EVENTS = "/metadata/scheduledevents?api-version=2020-07-01";
const NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";
const TIMEOUT_MS = 10_000;

/** `drain` and `resume` are the application's; both may be async. Without `name`, it is read from the endpoint. */
export class Handler {
  constructor({ endpoint = "http://169.254.169.254", name, drain, resume }) {
    Object.assign(this, { endpoint, name, drain, resume });
    this.isDrained = false;
    this.approved = new Set();
  }

  /** Poll once and react. An invalid response changes nothing; the next poll may succeed. */
  async poll() {
    try {
      this.name ??= await (await this.request(NAME)).text(); // the name in Resources, not the hostname
      const { Events } = await (await this.request(EVENTS)).json();
      // All VMs of an availability set see one document; only events that name this VM count.
      const ours = Events.filter((event) => event.Resources.includes(this.name));
      if (ours.length === 0) return await this.resumeWork();
      await this.prepare(ours[0]);
      for (const event of ours.filter(({ EventStatus }) => EventStatus === "Scheduled")) await this.approve(event);
    } catch (error) {
      console.log(`poll failed: ${error.message}`); // the next poll may succeed
    }
  }

  async prepare(event) {
    if (this.isDrained) return;
    console.log(`${event.EventType} is scheduled, not before ${event.NotBefore || "now"}: draining`);
    await this.drain();
    this.isDrained = true;
  }

  async resumeWork() {
    if (!this.isDrained) return;
    await this.resume();
    this.isDrained = false;
    this.approved.clear();
    console.log("the event is over: accepting work again");
  }

  /** Approve only once: an approved event may stay Scheduled until other VMs approve or another update domain is done. */
  async approve(event) {
    if (this.approved.has(event.EventId)) return;
    await this.request(EVENTS, { method: "POST", body: JSON.stringify({ StartRequests: [{ EventId: event.EventId }] }) });
    this.approved.add(event.EventId);
    console.log(`approved ${event.EventType} ${event.EventId}`);
  }

  async request(path, options = {}) {
    const signal = AbortSignal.timeout(TIMEOUT_MS);
    const response = await fetch(this.endpoint + path, { headers: { Metadata: "true" }, signal, ...options });
    if (response.ok) return response;
    await response.text();
    throw new Error(`${options.method ?? "GET"} ${path} failed with status ${response.status}`);
  }
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  let isOpen = true;
  createServer((request, response) => {
    response.statusCode = isOpen ? 200 : 503; // for the health check of a load balancer
    response.end(isOpen ? "open\n" : "draining\n");
  }).listen(process.env.PORT ?? 3000);
  const handler = new Handler({
    endpoint: process.env.ENDPOINT || process.env.FOREWARN_ENDPOINT || undefined, // `forewarn lab run` sets the second
    drain: () => { isOpen = false; return sleep(5_000); }, // requests in progress finish
    resume: () => { isOpen = true; },
  });
  for (;;) { // until the process is stopped
    await handler.poll();
    await sleep(1_000);
  }
}
