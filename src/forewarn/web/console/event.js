// One event: what its VMs see, who has approved, what is done to each VM, and its history.

import { eventActions } from "./actions.js";
import { get, path } from "./api.js";
import { badge, definitions, empty, field, h, keyed, link, links, name, show, table } from "./dom.js";
import { clockTime, length, relative } from "./format.js";
import { HISTORY_COLUMNS, historyRow } from "./history.js";
import { describeMissing } from "./now.js";
import { View } from "./view.js";

const ENTRIES_MAX = 200;
const IMPACTS = { impacted: "done", "impact-failed": "failed" };

/** Since when its VMs cannot read it, or for how long they could not; null if they could all the time. */
function describeUnreadable(event) {
  const since = event.unreadable_since;
  if (since) return ["Cannot be read", [`its VMs have not been able to read it since ${clockTime(since)}, `, relative(since)]];
  const seconds = event.unreadable_seconds;
  return seconds ? ["Could not be read", `for ${length(seconds * 1000)}, which does not count as notice`] : null;
}

export class EventView extends View {
  build() {
    const versions = this.store.session.api_versions;
    this.facts = h("section");
    this.version = h("select", { id: "version", onchange: () => this.redraw({ isAll: true }) },
      versions.map((version, index) => h("option", { selected: index === versions.length - 1 }, version)));
    this.raw = h("a", { target: "_blank", rel: "noopener" }, "As sent, byte for byte");
    this.document = h("pre", { tabindex: "0", role: "region", "aria-label": "Document" });
    this.rows = table("History of the event", HISTORY_COLUMNS);
    this.rows.element.classList.add("dense");
    this.append(this.facts,
      h("h2", {}, "What its VMs see"),
      h("div", { class: "filters" }, field("api-version", this.version), this.raw), this.document,
      h("h2", {}, "History"), this.rows.element);
  }

  async update({ isAll, events }) {
    if (!isAll && !events.has(this.detail)) return;
    this.entries = (await get(path`history?limit=${ENTRIES_MAX}&event=${this.detail}`)).history;
    keyed(this.rows.body, this.entries, (entry) => entry.number, (entry) => historyRow(this.rows, entry));
    this.showFacts();
    await this.showDocument();
  }

  showFacts() {
    const event = this.store.events.get(this.detail);
    const past = this.store.past.get(this.detail);
    show(this.facts, JSON.stringify([event, past, this.entries.length]), () => (event ? this.live(event) : this.over(past)));
  }

  live(event) {
    const isStarted = event.status === "Started";
    const [kind, word] = isStarted ? ["impact", "started"] : event.is_approved ? ["approved", "approved"] : ["notice", "in notice"];
    const start = event.started_at ?? event.not_before;
    const seconds = event.duration_seconds;
    const countdown = h("p", { class: "countdown" }, isStarted ? "Started " : "Deadline ", relative(start),
      h("small", {}, ` ${clockTime(start)}`));
    return this.content(event, badge(kind, word), [countdown, eventActions(this.store, event)], [
      event.waits_for ? ["Waits for", event.waits_for] : null,
      event.is_approved || isStarted ? null : ["Approval by", describeMissing(this.store, event)],
      describeUnreadable(event),
      ["Why", [event.cause, event.description ? `: ${event.description}` : ""]],
      ["Requested by", event.source === "User" ? "a user" : "the platform"],
      ["Expected length", seconds < 0 ? "unknown" : length(seconds * 1000)],
    ]);
  }

  content(event, state, actions, facts) {
    return [
      h("p", { class: "crumb" }, "Event of scope ", name(event.scope)),
      h("div", { class: "head" }, h("h1", {}, `${event.type} of `, links("vms", event.resources)), state),
      actions,
      h("div", { class: "card" }, definitions([
        ["Approvals", this.approvals(event)],
        event.created_at ? ["Announced", clockTime(event.created_at)] : null,
        ...facts,
        ["Id", h("code", {}, event.id)],
      ])),
      event.impacts.length ? [h("h2", {}, "Impacts"), this.impacts(event)] : "",
    ];
  }

  /** Who approved, and when: the event has the names, the history the times. */
  approvals(event) {
    if (!event.approvals.length) return event.status === "Scheduled" ? "none yet" : "none";
    return h("ul", { class: "plain" }, event.approvals.map((who) => {
      const entry = this.entries.find((each) => each.what === "approved" && (each.vm || "operator") === who)
        ?? this.entries.find((each) => each.what === "approved");
      return h("li", {}, this.store.vms.has(who) ? link("vms", who) : name(who),
        entry ? [" ", relative(entry.at), ` (${clockTime(entry.at)})`] : "");
    }));
  }

  impacts(event) {
    const rows = table("Impacts", ["VM", "State", "Attempts", "Details"]);
    const kinds = { done: "quiet", failed: "failed", waiting: "stopped" };
    const words = { claimed: "in progress", booting: "restarted, not back yet" };
    rows.body.append(...event.impacts.map((impact) => rows.row(
      link("vms", impact.vm), badge(kinds[impact.state] ?? "impact", words[impact.state] ?? impact.state), String(impact.tries),
      [impact.detail, impact.waits_for ? h("small", {}, `Waits for ${impact.waits_for}.`) : ""])));
    return rows.element;
  }

  over(past) {
    if (!past?.type) {
      return [h("h1", {}, "Event ", h("code", {}, this.detail)),
        empty("There is no such event now.", "It may have ended long ago: see its history below.")];
    }
    // The newest entry of a VM says how its impact ended: earlier attempts may have failed.
    const impacts = new Map();
    for (const { what, vm, detail } of this.entries.filter((entry) => entry.what in IMPACTS).reverse()) {
      impacts.set(vm, { vm, state: IMPACTS[what], tries: (impacts.get(vm)?.tries ?? 0) + 1, detail, waits_for: "" });
    }
    const approvals = this.entries.filter((entry) => entry.what === "approved").map((entry) => entry.vm || "operator");
    const kind = { failed: "failed", canceled: "stopped" }[past.how] ?? "quiet";
    return this.content({ ...past, approvals, impacts: [...impacts.values()] }, badge(kind, past.how ?? "ended"), [], [
      past.started_at ? ["Started", clockTime(past.started_at)] : null,
      past.ended_at ? ["Ended", [clockTime(past.ended_at), ", ", relative(past.ended_at)]] : null,
    ]);
  }

  async showDocument() {
    const scope = this.store.events.get(this.detail)?.scope;
    this.raw.hidden = this.version.parentElement.hidden = !scope;
    if (!scope) {
      this.document.textContent = "The event is over: its VMs no longer see it.";
      return;
    }
    const address = path`scopes/${scope}/document?api_version=${this.version.value}`;
    this.raw.setAttribute("href", `/api/v1/${address}`);
    this.document.textContent = JSON.stringify(await get(address), null, 2);
  }
}
