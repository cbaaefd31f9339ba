// What is happening now, what waits for somebody, and the timeline.

import { eventActions } from "./actions.js";
import { badge, button, empty, h, keyed, links, link, name, setText, show, table } from "./dom.js";
import { clockTime, count, relative } from "./format.js";
import { PROBLEMS, STATES } from "./store.js";
import { Timeline } from "./timeline.js";
import { View } from "./view.js";

const NUMBERS = {
  impact: ["Under impact", STATES.impact.shape],
  notice: ["In notice", STATES.notice.shape],
  waiting: ["Waiting for approval", "◔"],
  failed: ["Failed in 24 hours", STATES.failed.shape],
};
const PROBLEMS_MAX = 20;
const ROWS = 100; // of the events with the next deadlines, and more on request
const COLUMNS = ["Event", "VMs", "Deadline", "Waits for approval by", "Actions"];

/** "2 of web-0, web-1, web-2": whose approval is missing. */
export function describeMissing(store, event) {
  const missing = store.missingApprovals(event);
  const many = missing.count === missing.vms.length ? "all of " : `${missing.count} of `;
  return [missing.vms.length > 1 ? many : "", links("vms", missing.vms, 2)];
}

export class NowView extends View {
  build() {
    this.sentence = h("h1", { id: "sentence" });
    this.lead = h("p", { class: "lead" });
    this.numbers = {};
    const cards = Object.entries(NUMBERS).map(([key, [label, shape]]) => {
      this.numbers[key] = h("strong", {}, "0");
      return h("li", { class: `card number ${key}` }, h("span", { class: "shape", "aria-hidden": "true" }, shape),
        this.numbers[key], h("span", { class: "label" }, ` ${label}`));
    });
    this.problems = h("ul", { class: "plain problems" });
    this.moreProblems = h("p", { class: "soft" });
    this.attention = h("section", { class: "card attention", "aria-labelledby": "attention", hidden: true },
      h("h2", { id: "attention" }, "Needs attention"), this.problems, this.moreProblems);
    this.rows = table("Events whose approval is missing", COLUMNS, empty("Nothing waits for an approval.",
      "An event that a VM or a person has to approve appears here, with its deadline."));
    this.rows.element.classList.add("stack");
    this.shown = ROWS;
    this.more = button("", () => this.showMore());
    this.timeline = new Timeline(this.store);
    this.every(1000, () => this.timeline.tick());
    this.every(30_000, () => this.timeline.update());
    this.append(
      this.sentence, this.lead, this.attention,
      h("ul", { class: "numbers", "aria-label": "Events" }, cards),
      h("section", { "aria-labelledby": "waiting" }, h("h2", { id: "waiting" }, "Waiting for approval"),
        this.rows.none, this.rows.element, this.more),
      this.timeline.element,
    );
  }

  update() {
    const events = [...this.store.events.values()];
    const started = events.filter((event) => event.status === "Started");
    const notice = events.filter((event) => event.status === "Scheduled");
    const waiting = notice.filter((event) => !event.is_approved);
    waiting.sort((one, other) => new Date(one.not_before) - new Date(other.not_before));
    const failed = [...this.store.past.values()].filter((event) => event.how === "failed");
    const counts = { impact: started.length, notice: notice.length, waiting: waiting.length, failed: failed.length };
    for (const [key, number] of Object.entries(counts)) {
      setText(this.numbers[key], number.toLocaleString());
      this.numbers[key].parentElement.classList.toggle("some", number > 0);
    }
    const problems = this.store.problems();
    setText(this.sentence, describe(counts, problems));
    this.showProblems(problems);
    this.showLead(waiting);
    this.showWaiting(waiting);
    this.timeline.update();
  }

  showProblems(problems) {
    this.attention.hidden = !problems.length;
    const more = problems.length - PROBLEMS_MAX;
    this.moreProblems.hidden = more <= 0;
    setText(this.moreProblems, `and ${more.toLocaleString()} more: see Hosts and Fleet.`);
    keyed(this.problems, problems.slice(0, PROBLEMS_MAX), (each) => JSON.stringify(each), (each) => {
      const { state, one } = PROBLEMS[each.code] ?? { state: "failed", one: each.code };
      const word = one.replace(/^(host|VM) (is )?/, "");
      const vms = each.count ? ` Affects ${count(each.count, "VM")}, shown as last reported.` : "";
      return h("li", {}, badge(state, [STATES[state].shape, " ", word]), " ", link(each.kind, each.name), `: ${each.message}.${vms}`);
    });
  }

  showLead(waiting) {
    const { vms, scopes, hosts } = this.store;
    const size = `${count(vms.size, "VM")} in ${count(scopes.size, "scope")} on ${count(hosts.size, "host")}.`;
    const next = waiting.find((event) => !event.waits_for);
    show(this.lead, JSON.stringify([size, next?.id, next?.not_before]), () => {
      if (!vms.size) return ["There are no VMs yet. Apply a fleet file: ", h("code", {}, "forewarn fleet apply FILE")];
      return next ? [`${size} Next deadline: `, link("vms", next.resources[0]), ", ", relative(next.not_before), "."] : size;
    });
  }

  /** The focus stays on the button, or moves to the first of the last rows. */
  showMore() {
    const next = this.rows.body.rows.length;
    this.shown += ROWS;
    this.update();
    if (this.more.hidden) this.rows.body.rows[next].querySelector("a").focus();
  }

  showWaiting(waiting) {
    const left = waiting.length - this.shown;
    this.more.hidden = left <= 0;
    setText(this.more, `Show ${Math.min(ROWS, left)} more of ${left.toLocaleString()} with later deadlines`);
    this.rows.fill(waiting.slice(0, this.shown), (event) => event.id, (event) => this.row(event), (row, event) => {
      const [, , start, missing, actions] = row.children;
      show(start, `${event.not_before} ${event.waits_for}`, () => [relative(event.not_before),
        h("small", {}, event.waits_for ? `Waits for ${event.waits_for}` : clockTime(event.not_before))]);
      show(missing, `${event.approvals}`, () => h("span", {}, describeMissing(this.store, event)));
      show(actions, event.not_before, () => eventActions(this.store, event) ?? "");
    });
  }

  row(event) {
    return this.rows.row(
      [h("a", { href: `#/events/${event.id}` }, badge("notice", event.type)), h("small", {}, name(event.scope))],
      links("vms", event.resources), "", "", "",
    );
  }
}

function describe({ impact, notice, waiting }, problems) {
  const codes = Map.groupBy(problems, (each) => each.code);
  const parts = [...codes].map(([code, { length }]) =>
    (PROBLEMS[code] ? `${length.toLocaleString()} ${length === 1 ? PROBLEMS[code].one : PROBLEMS[code].many}` : code));
  if (!impact && !notice) return parts.length ? `${parts.join(", ")}.` : "All quiet.";
  if (impact) parts.push(`${count(impact, "event")} under impact`);
  if (notice) parts.push(`${impact ? notice : count(notice, "event")} in notice`);
  return `${parts.join(", ")}${waiting ? `; ${waiting} waiting for approval` : ""}.`;
}
