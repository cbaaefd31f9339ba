// Keeps a web application out of the way of what happens to its VM: it drains before it says "go ahead".
// Node 18 or newer, nothing else. `node handler.mjs` runs it on a real VM, here or on Azure.
import { createServer } from "node:http";
import { setTimeout as sleep } from "node:timers/promises";
import { pathToFileURL } from "node:url";

const EVENTS = "/metadata/scheduledevents?api-version=2020-07-01";
const NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";
const TIMEOUT_MS = 10_000;

/** `drain` and `resume` are the application's; both may be async. `name` is asked for if it is not given. */
export class Handler {
  constructor({ endpoint = "http://169.254.169.254", name, drain, resume }) {
    Object.assign(this, { endpoint, name, drain, resume });
    this.isDrained = false;
    this.approved = new Set();
  }

  /** One look at what is to come, and what follows from it. From an answer that makes no sense nothing follows. */
  async look() {
    try {
      this.name ??= await (await this.ask(NAME)).text(); // as in Resources; it is not the hostname
      const { Events } = await (await this.ask(EVENTS)).json();
      // All VMs of an availability set see one document; what counts is whether our name is in it.
      const ours = Events.filter((event) => event.Resources.includes(this.name));
      if (ours.length === 0) return await this.goOn();
      await this.getReady(ours[0]);
      for (const event of ours.filter((one) => one.EventStatus === "Scheduled")) await this.approve(event);
    } catch (problem) {
      console.log(`no sense to be had of the endpoint: ${problem.message}`); // the next look may succeed
    }
  }

  async getReady(event) {
    if (this.isDrained) return;
    console.log(`${event.EventType} ahead, not before ${event.NotBefore || "now"}: draining`);
    await this.drain();
    this.isDrained = true;
  }

  async goOn() {
    if (!this.isDrained) return;
    await this.resume();
    this.isDrained = false;
    this.approved.clear();
    console.log("it is over: taking work again");
  }

  /** Once: an approved event may still have to wait, for its turn or for the word of others. */
  async approve(event) {
    if (this.approved.has(event.EventId)) return;
    await this.ask(EVENTS, { method: "POST", body: JSON.stringify({ StartRequests: [{ EventId: event.EventId }] }) });
    this.approved.add(event.EventId);
    console.log(`approved ${event.EventType} ${event.EventId}`);
  }

  async ask(path, options = {}) {
    const signal = AbortSignal.timeout(TIMEOUT_MS);
    const answer = await fetch(this.endpoint + path, { headers: { Metadata: "true" }, signal, ...options });
    if (answer.ok) return answer;
    await answer.text();
    throw new Error(`${options.method ?? "GET"} ${path} was answered with ${answer.status}`);
  }
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  let isOpen = true;
  createServer((request, response) => {
    response.statusCode = isOpen ? 200 : 503; // what a load balancer's health check asks for
    response.end(isOpen ? "open\n" : "draining\n");
  }).listen(process.env.PORT ?? 3000);
  const handler = new Handler({
    endpoint: process.env.ENDPOINT || process.env.FOREWARN_ENDPOINT || undefined, // `forewarn lab run` sets the second
    drain: () => { isOpen = false; return sleep(5_000); }, // requests that are under way come to their end
    resume: () => { isOpen = true; },
  });
  for (;;) { // ends when it is stopped
    await handler.look();
    await sleep(1_000);
  }
}
