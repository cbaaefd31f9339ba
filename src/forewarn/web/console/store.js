// What the page knows of the fleet, kept up to date by the stream of changes.
//
// At the start, and after a gap in the stream, everything is read. From then on an entry of the
// history says what changed, and only that is read again. What changes without an entry (polls,
// daemons of hosts, the clock of a lab) is read now and then.

import { ApiError, follow, get, getAll, getSome, RETRY_MILLISECONDS } from "./api.js";
import { now, setServerTime } from "./format.js";

export const PAST_MILLISECONDS = 24 * 3600 * 1000;
const PAST_ENTRIES_MAX = 5000;
const COLLECT_MILLISECONDS = 50;
const CHECK_MILLISECONDS = 15_000;
const CLOCK_MILLISECONDS = 1000;
const JUMP_MILLISECONDS = 5000; // of a lab's clock
const CROWDED_MILLISECONDS = 20_000; // how often all is read while no stream is to be had
const DUE_MAX = 20; // the others are read again with everything else
const DIRTY_MAX = 50; // more than this, and the whole list is read

/** The states of a VM, most urgent first. A shape and a word, so that colour is never needed. */
export const STATES = {
  duplicate: { word: "on two hosts", shape: "‼" },
  impact: { word: "under impact", shape: "◆" },
  approved: { word: "approved", shape: "✓" },
  notice: { word: "in notice", shape: "▲" },
  failed: { word: "failed", shape: "✕" },
  unreachable: { word: "host unreachable", shape: "!" },
  unserved: { word: "gets no document", shape: "⊘" },
  silent: { word: "silent", shape: "?" },
  stopped: { word: "stopped", shape: "□" },
  deallocated: { word: "deallocated", shape: "○" },
  unknown: { word: "power unknown", shape: "◐" },
  quiet: { word: "quiet", shape: "●" },
};
/** What may be wrong with hosts and VMs, most urgent first, by the code of the API: a word for one, and for many. */
export const PROBLEMS = {
  duplicate: { state: "duplicate", one: "VM runs on two hosts", many: "VMs run on two hosts" },
  "duplicate-not-accepted": { state: "duplicate", one: "VM may run on two hosts", many: "VMs may run on two hosts" },
  missing: { state: "unserved", one: "VM is not where it ran", many: "VMs are not where they ran" },
  unreachable: { state: "unreachable", one: "host is unreachable", many: "hosts are unreachable" },
  "bridge-unserved": { state: "unserved", one: "bridge is not served", many: "bridges are not served" },
  "metadata-unreachable": { state: "unserved", one: "host gets no response for its guests", many: "hosts get no response for their guests" },
  unserved: { state: "unserved", one: "VM gets no document", many: "VMs get no document" },
  "left-running": { state: "unknown", one: "host was left running without a daemon", many: "hosts were left running without a daemon" },
  "address-taken": { state: "notice", one: "VM has the address of another one", many: "VMs have the addresses of others" },
  "not-accepted": { state: "notice", one: "VM is not accepted", many: "VMs are not accepted" },
};
const OF_COPIES = ["duplicate", "duplicate-not-accepted"];
/** Whether a VM certainly does not run; one of unknown power may. */
export const isOff = (vm) => vm.power === "stopped" || vm.power === "deallocated";
const ENDED = ["completed", "canceled", "failed"];
const OF_VMS = ["joined", "left", "moved", "updated", "impacted", "retired", "enabled", "failed", "unserved", "served"];
const OF_SCOPES = ["joined", "left", "updated", "retired", "enabled"];
const LISTS = ["vms", "scopes", "events", "hosts"];

const nothingDirty = () => ({
  isEmpty: true, isAll: false, isPast: false, isSession: false, isHosts: false, campaigns: false, entries: [],
  events: new Set(), vms: new Set(), scopes: new Set(),
});

export class Store extends EventTarget {
  session = null;
  clock = null; // of a lab
  isLive = false;
  staleSince = null;
  crowd = ""; // why the server refuses another stream
  vms = new Map();
  scopes = new Map();
  events = new Map();
  hosts = new Map();
  past = new Map(); // events of the last day, by id, made from the history
  #byVm = new Map(); // live events by VM
  #failedAt = new Map(); // when the last event of a VM failed
  #enabledAt = new Map(); // when the first VM of a scope polled: the others follow
  #dirty = nothingDirty();
  #timer = null; // also while something is read
  #isOpen = false; // the stream
  #isRead = true; // the last read succeeded
  #hasPast = false; // the last day was read

  /** Read everything, then follow what has happened since before that. */
  async start() {
    const [newest] = (await get("history?limit=1")).history;
    await this.readAll();
    follow(newest?.number ?? 0, {
      onOpen: () => this.#open(),
      onEntry: (entry) => this.#take(entry),
      onGap: () => this.#mark({ isAll: true }),
      onLost: (error) => this.#lose(error),
    });
    const interval = Math.min(600_000, Math.max(30_000, this.session.silent_seconds * 500));
    setInterval(() => this.#mark({ isAll: true }), interval);
    const hasDaemons = () => [...this.hosts.values()].some((host) => host.daemon);
    setInterval(() => {
      this.#markDue();
      this.#mark({ isSession: true, isHosts: hasDaemons() });
    }, CHECK_MILLISECONDS);
    if (this.session.is_lab) setInterval(() => this.readClock().catch((error) => this.#fail(error)), CLOCK_MILLISECONDS);
  }

  async readClock() {
    const before = now();
    this.clock = await get("clock");
    setServerTime(this.clock.now, this.clock.is_running);
    if (Math.abs(now() - before) > JUMP_MILLISECONDS) this.#changed({ isAll: true });
  }

  #setSession(session) {
    this.session = session;
    if (!session.is_lab) setServerTime(session.now);
  }

  /** The fleet is shown as soon as it is read; the last day may take longer. */
  async readAll() {
    this.#setSession(await get("session"));
    if (this.session.is_lab) await this.readClock();
    const lists = await Promise.all(LISTS.map((list) => getAll(list)));
    LISTS.forEach((list, index) => this.#replace(list, lists[index]));
    this.#changed({ isAll: true });
    this.#mark({ isPast: true });
  }

  async #readPast() {
    const since = encodeURIComponent(new Date(now() - PAST_MILLISECONDS).toISOString());
    const options = { limit: 1000, max: PAST_ENTRIES_MAX, query: `&since=${since}` };
    for (const entry of (await getAll("history", options)).reverse()) this.#remember(entry);
    this.#hasPast = true;
    this.#changed({ isAll: true });
  }

  /** The live events that name this VM. */
  eventsOf(vm) {
    return this.#byVm.get(vm) ?? [];
  }

  stateOf(vm) {
    if (vm.problems.some((problem) => problem.code === "duplicate")) return "duplicate";
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
    if (vm.problems.some((problem) => problem.code === "unserved")) return "unserved";
    const isPolled = this.#hasPast && this.scopes.get(vm.scope)?.is_enabled; // the past says since when
    const silentFor = now() - Math.max(new Date(vm.seen_at ?? 0), this.#enabledAt.get(vm.scope) ?? 0);
    return isPolled && silentFor > this.session.silent_seconds * 1000 ? "silent" : "quiet";
  }

  /** What is wrong with a VM. Its host may have been lost since the VM was read. */
  problemsOf(vm) {
    const away = this.hosts.get(vm.host)?.problems.find((problem) => problem.code === "unreachable");
    const host = away ? [{ code: "host-unreachable", message: `its host ${vm.host} is unreachable: ${away.message}` }] : [];
    return [...host, ...vm.problems.filter((problem) => problem.code !== "host-unreachable")];
  }

  /** Whether the power of a VM, and whatever is done to it, is only as its host has reported last. */
  isAway(vm) {
    return this.problemsOf(vm).some(({ code }) => code === "host-unreachable");
  }

  /**
   * What is wrong with hosts and VMs, most urgent first: `{kind, name, code, message, count}`. A VM whose host
   * is unreachable is counted with its host.
   */
  problems() {
    const found = [];
    for (const host of this.hosts.values()) {
      for (const { code, message } of host.problems) {
        const isAway = code === "unreachable";
        if (OF_COPIES.includes(code)) continue; // each is shown with its VM
        found.push({ kind: "hosts", name: host.name, code, message, count: isAway ? host.vms.length : 0 });
      }
    }
    for (const vm of this.vms.values()) {
      for (const { code, message } of vm.problems) {
        if (code !== "host-unreachable") found.push({ kind: "vms", name: vm.name, code, message, count: 0 });
      }
    }
    const order = Object.keys(PROBLEMS);
    return found.sort((one, other) => order.indexOf(one.code) - order.indexOf(other.code));
  }

  /** Whose approval an event waits for: how many, of which VMs, by the scope's policy. */
  missingApprovals(event) {
    const scope = this.scopes.get(event.scope);
    const running = (scope?.vms ?? []).filter((name) => this.vms.has(name) && !isOff(this.vms.get(name)));
    const vms = running.filter((name) => !event.approvals.includes(name));
    const approved = running.length - vms.length;
    const needed = { any: 1, all: running.length, quorum: Math.floor(running.length / 2) + 1 }[scope?.policy.approval ?? "any"];
    return { count: Math.max(needed - approved, 0), vms };
  }

  /** The stream continues after its last entry; what changes without an entry is read again. */
  #open() {
    this.#mark(this.staleSince ? { isAll: true } : { isSession: true });
    this.#isOpen = true;
    this.crowd = "";
    this.#showLive();
  }

  /** The stream ended or was refused. Returns when to try again. */
  #lose(error) {
    this.#isOpen = false;
    this.crowd = error?.facts?.streams_max ? error.message : "";
    this.#mark(this.crowd ? { isAll: true } : { isSession: true }); // has the session ended?
    this.#showLive();
    return this.crowd ? CROWDED_MILLISECONDS : RETRY_MILLISECONDS;
  }

  #showLive() {
    this.isLive = this.#isOpen && this.#isRead;
    const isFresh = this.isLive || (this.crowd && this.#isRead);
    if (isFresh || !this.staleSince) this.staleSince = isFresh ? null : new Date(now());
    this.dispatchEvent(new Event("live"));
  }

  #fail(error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) this.dispatchEvent(new Event("signed-out"));
    this.#isRead = false;
    this.#mark({ isAll: true }, RETRY_MILLISECONDS);
    this.#showLive();
  }

  /** What an event waits for that should have started changes without an entry. */
  #markDue() {
    const due = [...this.events.values()].filter((event) => event.status === "Scheduled"
      && (event.waits_for || event.is_approved || new Date(event.not_before) <= now()));
    due.slice(0, DUE_MAX).forEach((event) => this.#dirty.events.add(event.id));
  }

  #take(entry) {
    const dirty = this.#dirty;
    const { event, scope, what } = entry;
    dirty.entries.push(entry);
    if (event) dirty.events.add(event);
    if (OF_SCOPES.includes(what)) dirty.scopes.add(scope);
    if (OF_VMS.includes(what)) [entry.vm, ...entry.resources].forEach((vm) => vm && dirty.vms.add(vm));
    const isHosts = what === "updated" && entry.host !== "" && !entry.vm && !event; // its daemon came or went
    this.#mark({ campaigns: what === "campaign", isHosts });
  }

  #mark(what, wait = COLLECT_MILLISECONDS) {
    for (const [key, value] of Object.entries(what)) this.#dirty[key] ||= value;
    this.#dirty.isEmpty = false;
    this.#timer ??= setTimeout(() => this.#flush(), wait);
  }

  /** Read what is dirty; what gets dirty meanwhile is read next, so that no response overtakes another. */
  async #flush() {
    const dirty = this.#dirty;
    const begin = performance.now();
    this.#dirty = nothingDirty();
    let wait = COLLECT_MILLISECONDS;
    try {
      dirty.entries.forEach((entry) => this.#remember(entry));
      const isMuch = dirty.vms.size + dirty.events.size + dirty.scopes.size > DIRTY_MAX;
      await (dirty.isAll || isMuch ? this.readAll() : this.#reread(dirty));
      if (dirty.isPast) await this.#readPast();
      const wasRead = this.#isRead;
      this.#isRead = true;
      if (!wasRead) this.#showLive();
      wait = Math.max(wait, performance.now() - begin); // at most half of the time is spent reading
    } catch (error) {
      wait = RETRY_MILLISECONDS;
      this.#fail(error);
    } finally {
      this.#timer = this.#dirty.isEmpty ? null : setTimeout(() => this.#flush(), wait);
    }
  }

  async #reread({ events, vms, scopes, campaigns, entries, isSession, isHosts }) {
    const [session, someVms, someEvents, someScopes, allHosts] = await Promise.all([
      isSession ? get("session") : null, getSome("vms", vms), getSome("events", events),
      getSome("scopes", scopes), isHosts ? getAll("hosts") : null,
    ]);
    const hosts = new Set();
    for (const name of vms) {
      const [before, after] = [this.vms.get(name), someVms.find((vm) => vm.name === name)];
      if (before?.host !== after?.host) [before, after].forEach((vm) => vm?.host && hosts.add(vm.host));
    }
    const someHosts = await getSome("hosts", hosts);
    if (session) this.#setSession(session);
    const concerned = new Set(vms);
    for (const host of allHosts ?? []) {
      if (this.hosts.get(host.name)?.state !== host.state) host.vms.forEach((vm) => concerned.add(vm));
    }
    if (allHosts) this.#replace("hosts", allHosts);
    const addConcerned = () => events.forEach((id) => this.#resources(id).forEach((vm) => concerned.add(vm)));
    addConcerned();
    this.#replace("vms", someVms, vms);
    this.#replace("events", someEvents, events);
    this.#replace("scopes", someScopes, scopes);
    this.#replace("hosts", someHosts, hosts);
    addConcerned();
    this.#changed({ vms: concerned, events, campaigns, hasEntries: entries.length > 0 });
  }

  #resources(id) {
    return (this.events.get(id) ?? this.past.get(id))?.resources ?? [];
  }

  /** Put these items in place of those with these keys, or of all. */
  #replace(list, items, keys = null) {
    const known = this[list] = keys ? this[list] : new Map();
    keys?.forEach((key) => known.delete(key));
    for (const item of items) known.set(list === "events" ? item.id : item.name, item);
    if (list !== "events") return;
    this.#byVm = new Map();
    for (const event of known.values()) {
      for (const vm of event.resources) this.#byVm.set(vm, [...(this.#byVm.get(vm) ?? []), event]);
    }
  }

  /** Build events of the past from the history: the API has only live ones. */
  #remember(entry) {
    if (entry.what === "enabled") this.#enabledAt.set(entry.scope, new Date(entry.at));
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
