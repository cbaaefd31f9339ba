// Tests the handler in a lab: events on demand, and a clock that the test moves. `node --test`
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync } from "node:fs";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, beforeEach, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { Handler } from "./handler.mjs";

const READY_MS_MAX = 30_000;
let lab, handler, done;

before(async () => { lab = await startLab(); });
after(() => lab?.end());

beforeEach(() => {
  done = [];
  handler = new Handler({
    endpoint: lab.vms["web-0"], // requests to this URL come from web-0
    drain: () => done.push("drained"),
    resume: () => done.push("resumed"),
  });
});

afterEach(() => lab.advance(3600)); // end the events of the test

test("a reboot is approved after draining, and work resumes afterwards", async () => {
  const id = await lab.maintain("host-a");
  handler.drain = async () => done.push("drained", (await lab.event(id)).approvals.length);

  await handler.poll();
  assert.deepEqual(done, ["drained", 0], "approved before it was drained, or not drained");
  const approved = await lab.event(id);
  assert.deepEqual(approved.approvals, ["web-0"]);
  assert.equal(approved.status, "Started");

  await lab.advance(15 * 60);
  assert.equal(await lab.event(id), "completed");
  await handler.poll();
  assert.equal(done.at(-1), "resumed");
});

test("events of another VM are ignored", async () => {
  const id = await lab.maintain("host-b");

  await handler.poll();
  assert.deepEqual((await lab.event(id)).approvals, [], "approved another VM's event");
  assert.deepEqual(done, []);

  await lab.advance(15 * 60);
  assert.equal((await lab.event(id)).status, "Started");
});

test("a failed poll is retried and does not end the event", async () => {
  const id = await lab.maintain("host-a");

  await lab.fault({ fault: "status", code: 410, vms: ["web-0"], requests: 1 });
  await handler.poll();
  assert.deepEqual((await lab.event(id)).approvals, []);
  await handler.poll();
  assert.deepEqual((await lab.event(id)).approvals, ["web-0"]);

  await lab.fault({ fault: "status", code: 410, vms: ["web-0"], requests: 1 });
  await handler.poll();
  assert.deepEqual(done, ["drained"], "took a 410 for the end of the reboot");
});

/** Run a lab as a child process. Its ready file has the URLs; docs/lab.md has the API. */
async function startLab() {
  const folder = await mkdtemp(join(tmpdir(), "lab-"));
  const ready = join(folder, "ready.json");
  const child = spawn("forewarn", ["lab", "serve", "--port=0", "--control-port=0", `--ready-file=${ready}`], {
    stdio: ["ignore", "ignore", "inherit"],
  });
  const ended = once(child, "exit"); // rejects if the program is missing
  const end = async () => {
    child.kill();
    await ended;
    await rm(folder, { recursive: true });
  };
  try {
    await Promise.race([waitForFile(ready), ended.then(([code]) => { throw new Error(`the lab ended with ${code}`); })]);
  } catch (error) {
    child.kill();
    await rm(folder, { recursive: true });
    throw error;
  }
  const { control, vms } = JSON.parse(await readFile(ready, "utf8"));
  const api = async (method, path, body) => {
    const headers = { "Content-Type": "application/json" };
    const response = await fetch(`${control}/api/v1${path}`, { method, headers, body: body && JSON.stringify(body) });
    return response.json();
  };
  return {
    vms,
    end,
    /** Schedule a reboot of a host. Returns the id of the event for the web servers. */
    maintain: async (host) => {
      const { events } = await api("POST", `/hosts/${host}/maintain`, { type: "Reboot" });
      return events.find((event) => event.scope === "web").id;
    },
    /** An event in the control API, or how it ended. */
    event: async (id) => {
      const response = await api("GET", `/events/${id}`);
      return response.facts?.how ?? response;
    },
    advance: (seconds) => api("POST", "/clock/advance", { seconds }),
    fault: (fault) => api("POST", "/faults", fault),
  };
}

async function waitForFile(file) {
  for (const end = Date.now() + READY_MS_MAX; Date.now() < end; await sleep(50)) {
    if (existsSync(file)) return;
  }
  throw new Error(`${file} did not appear within ${READY_MS_MAX} ms`);
}
