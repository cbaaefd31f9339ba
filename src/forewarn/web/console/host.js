// Hosts. The question is: is it safe to touch this host now?

import { hostActions, mayAct } from "./actions.js";
import { badge, definitions, empty, field, h, link, name, setText, show, table } from "./dom.js";
import { byName, clockTime, count, relative } from "./format.js";
import { isOff, PROBLEMS, STATES } from "./store.js";
import { View } from "./view.js";

const REASONS_MAX = 50;
const REASONS_SHORT = 2;
const HOST_CAUSES = ["maintenance", "infrastructure", "live-migration", "degraded-hardware", "failed-hardware"];

/**
 * Whether the host may be touched now, because of what, and until when that is known.
 *
 * A host is safe if no VM may run on it, or if each one that does is under an impact that concerns its
 * host: then its notice has passed, and it expects to be interrupted.
 */
export function judge(store, host, vms) {
  const running = vms.filter((vm) => !isOff(vm));
  const others = host.other_vms.map((vm) => explainOther(store, vm));
  if (host.state === "unreachable") {
    const reason = host.problems.find((problem) => problem.code === "unreachable")?.message ?? "";
    return { answer: "unknown", title: `Unknown: ${reason}`, reasons: [], since: host.daemon.is_connected ? null : host.daemon.since };
  }
  const left = host.problems.find((problem) => problem.code === "left-running");
  if (!running.length && !others.length && left) return { answer: "unknown", title: `Unknown: ${left.message}`, reasons: [], since: null };
  const reasons = [...others, ...running.map((vm) => explainVm(store.eventsOf(vm.name), vm)).filter((reason) => reason)];
  const refused = host.problems.find((problem) => problem.code === "not-accepted");
  if (!reasons.length && refused) {
    return { answer: "unknown", title: `Unknown: a VM there is not accepted, and may run: ${refused.message}`, reasons: [], since: null };
  }
  if (!running.length && !others.length) return { answer: "yes", title: "Yes: no VM runs on it", reasons: [] };
  if (!reasons.length) {
    const ends = running.map((vm) => findImpact(store.eventsOf(vm.name))).map(({ started_at: start, duration_seconds: seconds }) =>
      (seconds > 0 ? new Date(start).getTime() + seconds * 1000 : Infinity));
    const title = "Yes, while its maintenance lasts: every VM was given notice and is under impact";
    return { answer: "yes", title, reasons, ends: Math.min(...ends) };
  }
  const isAllAnnounced = reasons.every(({ until }) => until);
  const until = isAllAnnounced ? reasons.map((reason) => reason.until).sort().at(-1) : null;
  return { answer: "no", title: `No: ${count(reasons.length, "VM")} would be interrupted`, reasons, until };
}

/** Why a VM must not be interrupted that runs here, although the fleet does not have it here. */
function explainOther(store, vm) {
  const known = store.vms.get(vm);
  const where = !known ? "is not in the fleet" : known.host ? `the fleet has it on ${known.host}` : "the fleet has it on no host";
  return { vm: { name: vm }, isUnknown: !known, event: null, isOther: true, text: `runs here, and ${where}: it is not notified` };
}

const findImpact = (events) => events.find((event) => event.status === "Started");

/** Why a running VM must not be interrupted now; null if it expects to be. */
function explainVm(events, vm) {
  const started = findImpact(events);
  const scheduled = events.find((event) => event.status === "Scheduled" && HOST_CAUSES.includes(event.cause));
  if (started && HOST_CAUSES.includes(started.cause)) return null;
  if (started) return { vm, event: started, text: `is under impact: ${started.type}` };
  if (scheduled?.waits_for) return { vm, event: scheduled, text: `has an event that waits for ${scheduled.waits_for}` };
  if (scheduled) {
    const until = scheduled.not_before;
    return { vm, event: scheduled, until, text: `has notice until ${clockTime(until)}` };
  }
  return { vm, event: null, text: `${vm.power === "running" ? "runs" : "may run"}, and has not been notified` };
}

const vmsByHost = (store) => Map.groupBy(store.vms.values(), (vm) => vm.host);
const scopesOf = (vms) => [...new Set(vms.map((vm) => vm.scope))].sort(byName);

export class HostsView extends View {
  build() {
    this.text = h("input", { type: "search", id: "host-text", placeholder: "Name", oninput: () => this.update() });
    this.rows = table("Hosts", ["Host", "Safe to touch now?", "VMs", "Scopes", "Events", "Daemon"],
      empty("No host matches.", "Hosts come from the fleet file, or from a daemon that reports its VMs."));
    this.rows.element.classList.add("stack");
    this.append(h("h1", {}, "Hosts"), h("p", { class: "lead" }, "Is it safe to touch a host now? Choose one to see why, and to act on it."),
      h("form", { class: "filters", onsubmit: (event) => event.preventDefault() }, field("Search", this.text)),
      this.rows.none, this.rows.element);
  }

  update() {
    const text = this.text.value.trim().toLowerCase();
    const vms = vmsByHost(this.store);
    const hosts = [...this.store.hosts.values()].filter((host) => host.name.toLowerCase().includes(text));
    hosts.sort((one, other) => byName(one.name, other.name));
    const create = (host) => this.rows.row(link("hosts", host.name), "", "", "", "", "");
    this.rows.fill(hosts, (host) => host.name, create, (row, host) => {
      const [, safe, on, scopes, events, daemon] = row.children;
      const placed = vms.get(host.name) ?? [];
      const { answer, reasons } = judge(this.store, host, placed);
      const why = reasons.length ? ` ${count(reasons.length, "VM")} would be interrupted` : "";
      show(safe, `${answer} ${why}`, () => [badge(answer === "no" ? "plain" : answer, answer), why]);
      setText(on, String(placed.length));
      setText(scopes, String(scopesOf(placed).length));
      setText(events, String(new Set(placed.flatMap((vm) => this.store.eventsOf(vm.name))).size));
      show(daemon, JSON.stringify([host.state, host.problems]), () => [
        host.state === "unreachable" ? badge("unreachable", host.state) : host.daemon ? host.state : "none",
        host.problems.slice(0, REASONS_SHORT).map(({ message }) => h("small", {}, message)),
        host.problems.length > REASONS_SHORT ? h("small", {}, `and ${host.problems.length - REASONS_SHORT} more`) : "",
      ]);
    });
  }
}

export class HostView extends View {
  update({ isAll }) {
    const host = this.store.hosts.get(this.detail);
    const vms = vmsByHost(this.store).get(this.detail) ?? [];
    const events = vms.map((vm) => this.store.eventsOf(vm.name));
    if (isAll) this.shownKey = "";
    show(this, JSON.stringify([host, vms, events]), () => (host ? this.content(host, vms) : [
      h("h1", {}, name(this.detail)), empty("There is no host with this name.", h("a", { href: "#/hosts" }, "All hosts")),
    ]));
  }

  content(host, vms) {
    const { answer, title, reasons, until, since, ends } = judge(this.store, host, vms);
    const shown = reasons.slice(0, REASONS_MAX);
    return [
      h("p", { class: "crumb" }, h("a", { href: "#/hosts" }, "Hosts")),
      h("h1", {}, "Is it safe to touch ", name(host.name), " now?"),
      h("div", { class: `card verdict ${answer}` },
        h("p", { class: "answer" }, title, "."),
        answer === "unknown" ? h("p", {}, since ? ["That was ", relative(since), ". "] : "", "Look at the host itself before you touch it.") : "",
        until ? h("p", {}, "The last notice ends ", relative(until), `, at ${clockTime(until)}. Then the impacts start.`) : "",
        ends ? h("p", {}, Number.isFinite(ends) ? `The first impact should end at ${clockTime(ends)}.`
          : "How long is not known: it ends when the first VM is back.") : "",
        reasons.some(({ isOther }) => isOther) ? h("p", {}, "Maintenance does not cover the VMs that the fleet does not have here: stop them first.") : "",
        answer === "no" && !until && reasons.some(({ isOther }) => !isOther) && mayAct(this.store)
          ? h("p", {}, "Maintain it below: its VMs are notified, and it is safe when their impacts have started.") : "",
        h("ul", { class: "reasons" }, shown.map(({ vm, event, text, isUnknown }) => h("li", {}, isUnknown ? name(vm.name) : link("vms", vm.name), " ",
          event ? h("a", { href: `#/events/${event.id}` }, text) : text))),
        reasons.length > shown.length ? h("p", {}, `and ${reasons.length - shown.length} more.`) : ""),
      hostActions(this.store, host),
      h("div", { class: "card" }, definitions([
        host.problems.length ? ["Problems", h("ul", { class: "plain" }, host.problems.map(({ code, message }) =>
          h("li", {}, badge(PROBLEMS[code]?.state ?? "failed", code.replaceAll("-", " ")), " ", message)))] : null,
        ["VMs", vms.length ? h("ul", { class: "chips" }, vms.slice(0, 200).map((vm) => this.chip(vm))) : "none"],
        ["Scopes", vms.length ? scopesOf(vms).map((scope, index) => [index ? ", " : "", name(scope)]) : "none"],
        ["Cannot move", host.unmovable.length ? h("ul", { class: "plain" }, host.unmovable.slice(0, REASONS_MAX).map(({ vm, why }) =>
          h("li", {}, link("vms", vm), `: ${why}`))) : "none known"],
        ["Daemon", host.daemon ? [`${host.daemon.is_connected ? "connected" : "away"} since ${clockTime(host.daemon.since)}, `, relative(host.daemon.since)] : "none: the server acts on this host itself"],
      ])),
      h("p", {}, "What happened before: ", h("a", { href: `#/history/host=${encodeURIComponent(host.name)}` }, "its history")),
    ];
  }

  chip(vm) {
    const state = this.store.stateOf(vm);
    const { shape, word } = STATES[state];
    return h("li", {}, h("a", { href: `#/vms/${encodeURIComponent(vm.name)}`, class: `badge ${state}` },
      h("span", { "aria-hidden": "true" }, `${shape} `), name(vm.name), `: ${word}`));
  }
}
