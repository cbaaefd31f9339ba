// What the handler owes its VM, tested in a lab: events on demand, and a clock that the test moves. `node --test`
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
    endpoint: lab.vms["web-0"], // whoever calls there is web-0
    drain: () => done.push("drained"),
    resume: () => done.push("resumed"),
  });
});

afterEach(() => lab.advance(3600)); // whatever a test began is over

test("a reboot is approved when the application is drained, and it goes on when it is over", async () => {
  const id = await lab.maintain("host-a");
  handler.drain = async () => done.push("drained", (await lab.event(id)).approvals.length);

  await handler.look();
  assert.deepEqual(done, ["drained", 0], "approved before it was drained, or not drained");
  const approved = await lab.event(id);
  assert.deepEqual(approved.approvals, ["web-0"]);
  assert.equal(approved.status, "Started");

  await lab.advance(15 * 60);
  assert.equal(await lab.event(id), "completed");
  await handler.look();
  assert.equal(done.at(-1), "resumed");
});

test("what befalls the neighbour is left to the neighbour", async () => {
  const id = await lab.maintain("host-b");

  await handler.look();
  assert.deepEqual((await lab.event(id)).approvals, [], "approved another VM's event");
  assert.deepEqual(done, []);

  await lab.advance(15 * 60);
  assert.equal((await lab.event(id)).status, "Started");
});

test("an endpoint that is gone is asked again, and is no all-clear", async () => {
  const id = await lab.maintain("host-a");

  await lab.fault({ fault: "status", code: 410, vms: ["web-0"], requests: 1 });
  await handler.look();
  assert.deepEqual((await lab.event(id)).approvals, []);
  await handler.look();
  assert.deepEqual((await lab.event(id)).approvals, ["web-0"]);

  await lab.fault({ fault: "status", code: 410, vms: ["web-0"], requests: 1 });
  await handler.look();
  assert.deepEqual(done, ["drained"], "took a 410 for the end of the reboot");
});

/** A lab as a child process: where it is stands in its ready file, and what it can do in docs/lab.md. */
async function startLab() {
  const folder = await mkdtemp(join(tmpdir(), "lab-"));
  const ready = join(folder, "ready.json");
  const child = spawn("forewarn", ["lab", "serve", "--port=0", "--control-port=0", `--ready-file=${ready}`], {
    stdio: ["ignore", "ignore", "inherit"],
  });
  const ended = once(child, "exit"); // rejects when there is no such program
  const end = async () => {
    child.kill();
    await ended;
    await rm(folder, { recursive: true });
  };
  try {
    await Promise.race([written(ready), ended.then(([code]) => { throw new Error(`the lab ended with ${code}`); })]);
  } catch (problem) {
    child.kill();
    await rm(folder, { recursive: true });
    throw problem;
  }
  const { control, vms } = JSON.parse(await readFile(ready, "utf8"));
  const api = async (method, path, body) => {
    const headers = { "Content-Type": "application/json" };
    const answer = await fetch(`${control}/api/v1${path}`, { method, headers, body: body && JSON.stringify(body) });
    return answer.json();
  };
  return {
    vms,
    end,
    /** The host below some VMs is to be rebooted; the id of the event of the web servers. */
    maintain: async (host) => {
      const { events } = await api("POST", `/hosts/${host}/maintain`, { type: "Reboot" });
      return events.find((event) => event.scope === "web").id;
    },
    /** An event as the platform sees it, or how it ended. */
    event: async (id) => {
      const answer = await api("GET", `/events/${id}`);
      return answer.facts?.how ?? answer;
    },
    advance: (seconds) => api("POST", "/clock/advance", { seconds }),
    fault: (fault) => api("POST", "/faults", fault),
  };
}

async function written(file) {
  for (const end = Date.now() + READY_MS_MAX; Date.now() < end; await sleep(50)) {
    if (existsSync(file)) return;
  }
  throw new Error(`there is no ${file} after ${READY_MS_MAX} ms`);
}
