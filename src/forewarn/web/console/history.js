// The history, with filters that are part of the address, and as a file.

import { explain, setOutcome } from "./actions.js";
import { get, getAll } from "./api.js";
import { badge, button, empty, field, h, link, links, name, table } from "./dom.js";
import { clockTime, count } from "./format.js";
import { View } from "./view.js";

export const HISTORY_COLUMNS = ["When", "What", "Scope", "VMs", "Host", "By", "Details"];
const FIELDS = [
  "number", "at", "by", "what", "scope", "event", "type", "cause", "resources", "vm", "host", "host_before",
  "not_before", "description", "detail",
];
const FILTERS = { vm: "VM", scope: "Scope", host: "Host", event: "Event id" };
const KINDS = [
  "scheduled", "approved", "started", "claimed", "restarted", "impacted", "impact-failed", "extended", "completed", "canceled",
  "failed", "executed-silently", "enabled", "joined", "left", "moved", "updated", "retired", "unserved", "served",
  "campaign", "token-created", "token-revoked", "restored",
];
const BADGES = {
  scheduled: "notice", extended: "notice", approved: "approved", started: "impact", completed: "quiet",
  failed: "failed", "impact-failed": "failed", canceled: "stopped",
  unserved: "failed", served: "quiet",
};
const EXPORT_MAX = 100_000;

export function historyRow(rows, entry) {
  const vms = entry.resources.length ? entry.resources : [entry.vm].filter(Boolean);
  const what = badge(BADGES[entry.what] ?? "plain", entry.what);
  const type = entry.type ? h("small", {}, entry.type) : "";
  return rows.row(
    h("time", { datetime: entry.at, title: entry.at }, clockTime(entry.at)),
    entry.event ? h("a", { href: `#/events/${entry.event}` }, what, type) : what,
    entry.scope ? name(entry.scope) : "", vms.length ? links("vms", vms) : "", entry.host ? link("hosts", entry.host) : "",
    name(entry.by), entry.detail ? h("bdi", { class: "text" }, entry.detail) : "");
}

export class HistoryView extends View {
  build() {
    const given = new URLSearchParams(this.detail);
    const input = (filter) => h("input", { type: "search", id: `by-${filter}`, value: given.get(filter) ?? "" });
    this.inputs = Object.fromEntries(Object.keys(FILTERS).map((filter) => [filter, input(filter)]));
    this.inputs.what = h("select", { id: "by-what" }, ["", ...KINDS].map((kind) =>
      h("option", { value: kind, selected: kind === given.get("what") }, kind || "All changes")));
    this.rows = table("History", HISTORY_COLUMNS, empty("No entry matches.", "Change or clear the filters."));
    this.rows.element.classList.add("dense");
    this.more = button("Show older entries", () => this.read(this.next));
    this.output = h("p", { role: "status", class: "outcome" });
    this.append(
      h("div", { class: "head" }, h("h1", {}, "History"), h("div", { class: "actions" },
        button("Export as CSV", () => this.export("csv")), button("Export as JSON Lines", () => this.export("jsonl")))),
      h("form", { class: "filters", onsubmit: (event) => this.apply(event) },
        Object.entries(FILTERS).map(([filter, label]) => field(label, this.inputs[filter])), field("Change", this.inputs.what),
        h("button", { type: "submit", class: "primary" }, "Filter")),
      this.output, this.rows.none, this.rows.element, this.more);
    this.entries = [];
  }

  /** New entries are added on top; older pages, once they are shown, stay as they are. */
  async update({ isAll, hasEntries }) {
    if (!this.isPaged && (isAll || hasEntries)) await this.read();
  }

  query() {
    const query = new URLSearchParams();
    for (const [filter, { value }] of Object.entries(this.inputs)) if (value.trim()) query.set(filter, value.trim());
    return query;
  }

  apply(event) {
    event.preventDefault();
    const query = this.query().toString();
    history.replaceState(null, "", query ? `#/history/${query}` : "#/history");
    this.read();
  }

  async read(cursor = null) {
    const query = this.query();
    const reading = this.reading = {};
    if (cursor) query.set("cursor", cursor);
    try {
      const page = await get(`history?${query}`);
      if (this.reading !== reading) return; // the filters have changed since
      this.entries = cursor ? [...this.entries, ...page.history] : page.history;
      this.isPaged = cursor !== null;
      this.next = page.next;
      setOutcome(this.output, "");
    } catch (error) {
      setOutcome(this.output, explain(error), "bad");
    }
    this.show();
  }

  show() {
    this.more.hidden = !this.next;
    this.rows.fill(this.entries, (entry) => entry.number, (entry) => historyRow(this.rows, entry));
  }

  async export(kind) {
    setOutcome(this.output, "Exporting…");
    try {
      const query = `&${this.query()}`.replace(/&$/, "");
      const entries = await getAll("history", { limit: 1000, max: EXPORT_MAX, query });
      const lines = entries.map(kind === "csv" ? csvLine : (entry) => JSON.stringify(entry));
      save(`forewarn-history.${kind}`, [...(kind === "csv" ? [FIELDS.join(",")] : []), ...lines, ""].join("\n"));
      setOutcome(this.output, entries.length >= EXPORT_MAX
        ? `The newest ${count(EXPORT_MAX, "entry", "entries")} were exported; filter for older ones.`
        : `${count(entries.length, "entry", "entries")} exported as forewarn-history.${kind}.`, "good");
    } catch (error) {
      setOutcome(this.output, explain(error), "bad");
    }
  }
}

function save(file, content) {
  const url = URL.createObjectURL(new Blob([content], { type: "application/octet-stream" }));
  h("a", { href: url, download: file }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

const csvLine = (entry) => FIELDS.map((each) => cell(entry[each])).join(",");

/** A cell of a CSV file. A leading =, +, - or @ would be a formula in a spreadsheet. */
function cell(value) {
  const text = Array.isArray(value) ? value.join(" ") : String(value ?? "");
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
