// What the page knows of the fleet, kept up to date by the stream of changes.
//
// At the start, and after a gap in the stream, everything is read. From then on an entry of the
// history says what changed, and only that is read again. What changes without an entry (polls,
// daemons of hosts, the clock of a lab) is read now and then.

import { ApiError, follow, get, getAll, path, RETRY_MILLISECONDS } from "./api.js";
import { now, setServerTime } from "./format.js";

export const PAST_MILLISECONDS = 24 * 3600 * 1000;
const PAST_ENTRIES_MAX = 5000;
const COLLECT_MILLISECONDS = 50;
const CHECK_MILLISECONDS = 15_000;
const CLOCK_MILLISECONDS = 1000;
const REREAD_MILLISECONDS = [30_000, 600_000];
const DIRTY_MAX = 50; // more than this, and the whole list is read

/** The states of a VM, most urgent first. A shape and a word, so that colour is never needed. */
export const STATES = {
  impact: { word: "under impact", shape: "◆" },
  approved: { word: "approved", shape: "✓" },
  notice: { word: "in notice", shape: "▲" },
  failed: { word: "failed", shape: "✕" },
  unreachable: { word: "host unreachable", shape: "!" },
  silent: { word: "silent", shape: "?" },
  stopped: { word: "stopped", shape: "□" },
  deallocated: { word: "deallocated", shape: "○" },
  quiet: { word: "quiet", shape: "●" },
};
const ENDED = ["completed", "canceled", "failed"];
const OF_VMS = ["joined", "left", "moved", "updated", "impacted", "retired", "enabled", "failed"];

const nothingDirty = () => ({
  isEmpty: true, isAll: false, isPast: false, entries: [], events: new Set(), vms: new Set(), left: new Set(),
  session: false, scopes: false, hosts: false, campaigns: false,
});
const byKey = (items) => new Map(items.map((item) => [item.name, item]));

export class Store extends EventTarget {
  session = null;
  clock = null; // of a lab
  isLive = false;
  staleSince = null;
  vms = new Map();
  scopes = new Map();
  events = new Map();
  hosts = new Map();
  past = new Map(); // events of the last day, by id, made from the history
  #byVm = new Map(); // ids of live events by VM
  #failedAt = new Map(); // when the last event of a VM failed
  #dirty = nothingDirty();
  #timer = null; // also while something is read
  #isOpen = false; // the stream
  #isRead = true; // the last read succeeded
  #reconnect = null;

  /** Read everything, then follow what has happened since before that. */
  async start() {
    const [newest] = (await get("history?limit=1")).history;
    await this.readAll();
    this.#reconnect = follow(newest?.number ?? 0, {
      onEntry: (entry) => this.#take(entry),
      onOpen: (isOpen) => this.#setOpen(isOpen),
      onGap: () => this.#mark({ isAll: true }),
    });
    const [least, most] = REREAD_MILLISECONDS;
    const reread = Math.min(most, Math.max(least, this.session.silent_seconds * 500));
    setInterval(() => this.#mark({ isAll: true }), reread);
    // A lost server is noticed by the stream, or here where a network has lost it silently.
    const hasDaemons = () => [...this.hosts.values()].some((host) => host.daemon);
    setInterval(() => this.#mark(hasDaemons() ? { session: true, hosts: true } : { session: true }), CHECK_MILLISECONDS);
    if (this.session.is_lab) setInterval(() => this.readClock().catch((error) => this.#fail(error)), CLOCK_MILLISECONDS);
  }

  async readClock() {
    this.clock = await get("clock");
    setServerTime(this.clock.now, this.clock.is_running);
  }

  #setSession(session) {
    this.session = session;
    if (!session.is_lab) setServerTime(session.now);
  }

  /** The fleet is shown as soon as it is read; the last day may take longer. */
  async readAll() {
    this.#setSession(await get("session"));
    if (this.session.is_lab) await this.readClock();
    const lists = await Promise.all(["vms", "scopes", "events", "hosts"].map((list) => getAll(list)));
    const [vms, scopes, events, hosts] = lists;
    [this.vms, this.scopes, this.hosts] = [vms, scopes, hosts].map(byKey);
    this.#setEvents(events);
    this.#changed({ isAll: true });
    this.#mark({ isPast: true });
  }

  async #readPast() {
    const since = encodeURIComponent(new Date(now() - PAST_MILLISECONDS).toISOString());
    const options = { limit: 1000, max: PAST_ENTRIES_MAX, query: `&since=${since}` };
    for (const entry of (await getAll("history", options)).reverse()) this.#remember(entry);
    this.#changed({ isAll: true });
  }

  /** The live events that name this VM. */
  eventsOf(vm) {
    return [...(this.#byVm.get(vm) ?? [])].map((id) => this.events.get(id));
  }

  stateOf(vm) {
    const events = this.eventsOf(vm.name);
    const started = events.find((event) => event.status === "Started");
    const impact = started?.impacts.find((each) => each.vm === vm.name);
    if (started) return impact?.state === "failed" ? "failed" : "impact";
    if (events.some((event) => event.is_approved)) return "approved";
    if (events.length) return "notice";
    const failedAt = this.#failedAt.get(vm.name);
    if (failedAt && now() - failedAt < PAST_MILLISECONDS) return "failed";
    if (vm.power !== "running") return vm.power;
    if (this.hosts.get(vm.host)?.state === "unreachable") return "unreachable";
    const isPolled = this.scopes.get(vm.scope)?.is_enabled;
    const silentFor = vm.seen_at ? now() - new Date(vm.seen_at) : Infinity;
    return isPolled && silentFor > this.session.silent_seconds * 1000 ? "silent" : "quiet";
  }

  /** Whose approval an event waits for: how many, of which VMs, by the scope's policy. */
  missingApprovals(event) {
    const scope = this.scopes.get(event.scope);
    const running = (scope?.vms ?? []).filter((name) => this.vms.get(name)?.power === "running");
    const vms = running.filter((name) => !event.approvals.includes(name));
    const approved = running.length - vms.length;
    const needed = { any: 1, all: running.length, quorum: Math.floor(running.length / 2) + 1 }[scope?.policy.approval ?? "any"];
    return { count: Math.max(needed - approved, 0), vms };
  }

  /** The stream continues after its last entry; what changes without an entry is read again. */
  #setOpen(isOpen) {
    this.#mark(isOpen && this.staleSince ? { isAll: true } : { session: true }); // has the session ended?
    this.#isOpen = isOpen;
    this.#showLive();
  }

  #showLive() {
    this.isLive = this.#isOpen && this.#isRead;
    if (this.isLive) this.staleSince = null;
    else this.staleSince ??= new Date(now()).toISOString();
    this.dispatchEvent(new Event("live"));
  }

  /** What is shown may be old until everything was read again. */
  #fail(error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) this.dispatchEvent(new Event("signed-out"));
    const isLost = error.status === 0 && this.#isOpen;
    this.#isRead = false;
    if (isLost) this.#reconnect();
    this.#isOpen &&= !isLost;
    this.#mark({ isAll: true }, RETRY_MILLISECONDS);
    this.#showLive();
  }

  #take(entry) {
    const dirty = this.#dirty;
    const { event, scope, what } = entry;
    dirty.entries.push(entry);
    if (event) dirty.events.add(event);
    if (scope && OF_VMS.includes(what)) {
      dirty.scopes = true;
      for (const vm of [entry.vm, ...entry.resources]) if (vm) dirty.vms.add(vm);
    }
    if (what === "left") dirty.left.add(entry.vm);
    if (what === "campaign") dirty.campaigns = true;
    if (event || OF_VMS.includes(what)) dirty.hosts = true;
    this.#mark({});
  }

  #mark(what, wait = COLLECT_MILLISECONDS) {
    Object.assign(this.#dirty, what, { isEmpty: false });
    this.#timer ??= setTimeout(() => this.#flush(), wait);
  }

  /** Read what is dirty; what gets dirty meanwhile is read next, so that no response overtakes another. */
  async #flush() {
    const dirty = this.#dirty;
    this.#dirty = nothingDirty();
    let wait = COLLECT_MILLISECONDS;
    try {
      dirty.entries.forEach((entry) => this.#remember(entry));
      if (dirty.isAll || dirty.vms.size > DIRTY_MAX) await this.readAll();
      else await this.#reread(dirty);
      if (dirty.isPast) await this.#readPast();
      const wasRead = this.#isRead;
      this.#isRead = true;
      if (!wasRead) this.#showLive();
    } catch (error) {
      wait = RETRY_MILLISECONDS;
      this.#fail(error);
    } finally {
      this.#timer = this.#dirty.isEmpty ? null : setTimeout(() => this.#flush(), wait);
    }
  }

  /** Lists are read whole: something that has just ended or left would be an error by its name. */
  async #reread({ events, vms, left, ...dirty }) {
    const named = [...vms].filter((vm) => !left.has(vm));
    const [session, allEvents, allScopes, allHosts, ...some] = await Promise.all([
      dirty.session ? get("session") : null,
      events.size ? getAll("events") : null, dirty.scopes ? getAll("scopes") : null,
      dirty.hosts ? getAll("hosts") : null, ...named.map((vm) => get(path`vms/${vm}`).catch(ignoreGone)),
    ]);
    if (session) this.#setSession(session);
    if (allScopes) this.scopes = byKey(allScopes);
    if (allHosts) this.hosts = byKey(allHosts);
    left.forEach((vm) => this.vms.delete(vm));
    named.forEach((vm, index) => (some[index] ? this.vms.set(vm, some[index]) : this.vms.delete(vm)));
    const concerned = new Set(vms);
    for (const id of events) this.#resources(id).forEach((vm) => concerned.add(vm));
    if (allEvents) this.#setEvents(allEvents);
    for (const id of events) this.#resources(id).forEach((vm) => concerned.add(vm));
    this.#changed({ vms: concerned, events, hosts: dirty.hosts, campaigns: dirty.campaigns });
  }

  #resources(id) {
    return (this.events.get(id) ?? this.past.get(id))?.resources ?? [];
  }

  #setEvents(events) {
    this.events = new Map();
    this.#byVm = new Map();
    for (const event of events) this.#putEvent(event);
  }

  #putEvent(event) {
    this.events.set(event.id, event);
    for (const vm of event.resources) {
      if (!this.#byVm.has(vm)) this.#byVm.set(vm, new Set());
      this.#byVm.get(vm).add(event.id);
    }
  }

  /** Build events of the past from the history: the API has only live ones. */
  #remember(entry) {
    if (!entry.event) return;
    const event = this.past.get(entry.event) ?? { id: entry.event, resources: [], done: [] };
    event.type = entry.type ?? event.type;
    event.scope = entry.scope || event.scope;
    event.update_domain ??= this.vms.get(entry.resources[0])?.update_domain;
    const { at, resources, not_before: notBefore } = entry;
    if (entry.what === "scheduled") Object.assign(event, { created_at: at, not_before: notBefore, resources });
    if (entry.what === "extended") event.not_before = notBefore;
    if (entry.what === "started") Object.assign(event, { started_at: at, resources });
    if (entry.what === "impacted") {
      event.done.push(entry.vm);
      this.#failedAt.delete(entry.vm);
    }
    if (ENDED.includes(entry.what)) {
      Object.assign(event, { ended_at: at, how: entry.what });
      for (const vm of event.resources) {
        if (entry.what === "failed" && !event.done.includes(vm)) this.#failedAt.set(vm, new Date(at));
        if (entry.what === "completed") this.#failedAt.delete(vm);
      }
    }
    this.past.set(entry.event, event);
  }

  #changed(detail) {
    for (const [id, event] of this.past) {
      if (event.ended_at && now() - new Date(event.ended_at) > PAST_MILLISECONDS) this.past.delete(id);
    }
    this.dispatchEvent(new CustomEvent("change", { detail }));
  }
}

function ignoreGone(error) {
  if (error.status !== 404) throw error;
}
