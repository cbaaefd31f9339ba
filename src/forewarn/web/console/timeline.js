// Events in time: a lane for each scope and update domain, so that "one at a time" can be seen.
// A bar is the notice (hatched) and then the impact (solid). Time in which nothing happens is folded.

import { badge, button, empty, h, svg } from "./dom.js";
import { byName, clockTime, fromNow, length, now, shortTime } from "./format.js";

const ROW = 26; // the height of a bar and the space around it
const PAD = 5;
const TOP = 26;
const FOLD = 34;
const FOLD_TEXT_MIN = 24;
const BAR_MIN = 5;
const TEXT_MIN = 30;
const CHARACTER = 6.6;
const WIDTH_MIN = 520;
const LANES_MAX = 200;
const ZOOM_MAX = 64;
const MINUTE = 60_000;
const SHORTEST = 5000; // of the lengths below, which a rate divides like the notices
const FOLDED_MIN = 20 * MINUTE;
const MARGIN = 4 * MINUTE;
const UNKNOWN = 10 * MINUTE; // how long an impact is drawn whose length is not known
const STEPS = [1 / 12, 1 / 6, 0.25, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 180, 360].map((minutes) => minutes * MINUTE);
const LEGEND = ["notice", "impact", "completed", "failed", "canceled"];

export class Timeline {
  #zoom = 1;
  #frame = 0;

  constructor(store) {
    this.store = store;
    this.details = h("p", { class: "tip", role: "tooltip", id: "tip", hidden: true });
    this.labels = h("div", { class: "lanes", "aria-hidden": "true" });
    this.scroll = h("div", { class: "picture", tabindex: "0", role: "region", "aria-label": "Timeline" });
    this.body = h("div", { class: "card timeline" }, this.labels, this.scroll, this.details);
    this.out = button("−", () => this.#zoomBy(0.5), { "aria-label": "Zoom out" });
    this.in = button("+", () => this.#zoomBy(2), { "aria-label": "Zoom in" });
    this.element = h("section", { "aria-labelledby": "timeline" },
      h("div", { class: "head" }, h("h2", { id: "timeline" }, "Timeline"),
        h("ul", { class: "legend" }, LEGEND.map((kind) => h("li", {}, badge(kind, kind)))),
        h("div", { class: "actions" }, this.out, this.in)),
      this.body);
    new ResizeObserver(() => this.update()).observe(this.scroll);
  }

  /** What is in the middle stays there. */
  #zoomBy(factor) {
    const middle = this.scroll.scrollLeft + this.scroll.clientWidth / 2;
    const time = this.scale?.timeAt(middle);
    this.#zoom = Math.min(ZOOM_MAX, Math.max(1, this.#zoom * factor));
    this.update();
    if (time) this.scroll.scrollLeft = this.scale.at(time) - this.scroll.clientWidth / 2;
  }

  update() {
    const bars = this.#bars();
    const lanes = arrange(bars).slice(0, LANES_MAX);
    this.out.disabled = this.#zoom <= 1;
    if (!lanes.length) {
      this.labels.replaceChildren();
      this.scroll.replaceChildren(empty("Nothing in the last 24 hours, and nothing planned.",
        "An event appears here as soon as it is announced."));
      return;
    }
    this.labels.replaceChildren(...lanes.map((lane, index) => {
      const isFirst = lanes[index - 1]?.scope !== lane.scope;
      const label = h("div", { title: lane.name }, h("bdi", {}, isFirst ? lane.scope : ""), h("small", {}, lane.domain));
      label.style.height = `${lane.height}px`;
      return label;
    }));
    const width = Math.max(this.scroll.clientWidth - 2, WIDTH_MIN) * this.#zoom;
    const isNew = !this.scroll.querySelector("svg");
    const { scrollLeft: left, clientWidth } = this.scroll;
    const isNowIn = (width) => Math.abs(this.scale.at(now()) - left - width / 2) < width / 2;
    const wasNowShown = isNew || isNowIn(this.#frame); // before the window was resized
    this.#frame = clientWidth;
    const scale = this.scale = makeScale(lanes.flatMap((lane) => lane.bars), width, (time) => this.#shorten(time));
    const height = lanes.reduce((sum, lane) => sum + lane.height, TOP);
    const picture = svg("svg", { width, height, role: "group", "aria-label": "Events by scope and update domain" },
      hatch(), lanes.filter((_, index) => index % 2).map(({ y, height: tall }) => svg("rect", { class: "lane", y, width, height: tall })),
      axis(scale, height), lanes.map((lane) => lane.bars.map((bar) => this.#bar(bar, lane, scale))), nowLine(height));
    const focused = document.activeElement?.dataset?.event;
    this.scroll.replaceChildren(picture);
    this.tick();
    const isLost = isNew || (wasNowShown && !isNowIn(clientWidth));
    this.scroll.scrollLeft = isLost ? scale.at(now()) - clientWidth * 0.6 : left;
    if (focused) picture.querySelector(`[data-event="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  /** Called every second: the line moves, all else stays until something changes. */
  tick() {
    this.scroll.querySelector(".now")?.setAttribute("transform", `translate(${this.scale.at(now())} 0)`);
  }

  #shorten(time) {
    return Math.max(time / this.store.session.rate, SHORTEST);
  }

  #bars() {
    const live = [...this.store.events.values()];
    const past = [...this.store.past.values()].filter((event) => event.ended_at && !this.store.events.has(event.id));
    return [...live, ...past].filter((event) => event.created_at || event.started_at).map((event) => {
      const at = (time) => (time ? new Date(time).getTime() : null);
      const end = at(event.ended_at);
      const begin = at(event.created_at ?? event.started_at);
      const impact = at(event.started_at) ?? end ?? Math.max(at(event.not_before), now());
      const planned = event.duration_seconds > 0 ? event.duration_seconds * 1000 : this.#shorten(UNKNOWN);
      const last = end ?? Math.max(impact + planned, now());
      const domain = event.update_domain ?? this.store.vms.get(event.resources[0])?.update_domain;
      return { event, scope: event.scope, domain, begin, impact, end: last, isLive: end === null };
    });
  }

  #bar({ event, begin, impact, end, row, isLive }, lane, scale) {
    const y = lane.y + PAD + row * ROW;
    const [x, middle, last] = [begin, impact, end].map(scale.at);
    const how = event.how ?? (event.status === "Started" ? "impact" : "notice");
    const width = Math.max(last - x, BAR_MIN);
    const text = `${event.type} ${event.resources.join(", ")}`;
    const label = `${text} (${event.scope}): ${describe(event, isLive)}`;
    const solid = how === "canceled" ? 0 : Math.max(last - middle, BAR_MIN);
    const size = { y, height: ROW - 6, rx: 3 };
    const bar = svg("a", {
      href: `#/events/${event.id}`, "data-event": event.id, class: `bar ${how}`, "aria-label": label,
    },
    svg("rect", { class: "notice", x, width: Math.max(middle - x, 0), ...size }),
    svg("rect", { class: "impact", x: middle, width: solid, ...size }),
    width > TEXT_MIN ? svg("text", { x: x + 5, y: y + 14 }, cut(text, Math.floor((width - 8) / CHARACTER))) : null);
    const show = () => this.#showTip(bar, text, describe(event, isLive));
    const hide = () => { this.details.hidden = true; };
    for (const kind of ["mouseenter", "focus"]) bar.addEventListener(kind, show);
    for (const kind of ["mouseleave", "blur"]) bar.addEventListener(kind, hide);
    return bar;
  }

  #showTip(bar, title, text) {
    this.details.replaceChildren(h("strong", {}, h("bdi", {}, title)), h("br"), text);
    this.details.hidden = false;
    const [frame, place, tip] = [this.body, bar, this.details].map((each) => each.getBoundingClientRect());
    const left = Math.min(Math.max(place.left - frame.left, 8), frame.width - tip.width - 8);
    const isLow = place.bottom + tip.height + 12 > frame.bottom;
    const top = isLow ? place.top - tip.height - 6 : place.bottom + 6;
    this.details.style.transform = `translate(${Math.max(left, 0)}px, ${top - frame.top}px)`;
  }
}

function describe(event, isLive) {
  const parts = [];
  if (event.created_at) parts.push(`announced ${clockTime(event.created_at)}`);
  if (event.started_at) parts.push(`started ${clockTime(event.started_at)}`);
  else if (isLive) parts.push(`deadline ${clockTime(event.not_before)}, ${fromNow(event.not_before)}`);
  if (event.ended_at) parts.push(`${event.how} ${clockTime(event.ended_at)}`);
  if (isLive && event.status === "Scheduled") parts.push(event.is_approved ? "approved" : "not approved yet");
  return parts.join(", ");
}

/** Lanes with their bars. Bars of a lane that overlap are below each other. */
function arrange(bars) {
  const lanes = new Map();
  for (const bar of bars.sort((one, other) => one.begin - other.begin)) {
    const domain = bar.domain === undefined ? "domain unknown" : `domain ${bar.domain}`;
    const key = `${bar.scope} ${domain}`;
    if (!lanes.has(key)) lanes.set(key, { name: key, scope: bar.scope, domain, bars: [], ends: [] });
    const lane = lanes.get(key);
    const free = lane.ends.findIndex((end) => end <= bar.begin);
    bar.row = free === -1 ? lane.ends.length : free;
    lane.ends[bar.row] = bar.end;
    lane.bars.push(bar);
  }
  let y = TOP;
  const sorted = [...lanes.values()].sort((one, other) => byName(one.name, other.name));
  for (const lane of sorted) {
    lane.y = y;
    lane.height = lane.ends.length * ROW + 2 * PAD - 6;
    y += lane.height;
  }
  return sorted;
}

/**
 * Where a time is, in pixels. A gap between what happens is FOLD wide, however long it is, and less if
 * there are so many that they would take more than half of the width.
 */
function makeScale(bars, width, shorten) {
  const margin = shorten(MARGIN);
  const spans = [...bars, { begin: now(), end: now() }].map(({ begin, end }) => [begin - margin, end + margin]);
  const merged = [];
  for (const [from, to] of spans.sort((one, other) => one[0] - other[0])) {
    const last = merged.at(-1);
    if (last && from <= last.to + shorten(FOLDED_MIN)) last.to = Math.max(last.to, to);
    else merged.push({ from, to });
  }
  const total = merged.reduce((sum, { from, to }) => sum + to - from, 0);
  const fold = Math.min(FOLD, width / 2 / merged.length);
  const pixels = (width - fold * (merged.length - 1)) / total;
  let x = 0;
  for (const span of merged) {
    span.x = x;
    x += (span.to - span.from) * pixels + fold;
  }
  const at = (time) => {
    const span = merged.findLast(({ from }) => from <= time) ?? merged[0];
    return span.x + (Math.min(Math.max(time, span.from), span.to) - span.from) * pixels;
  };
  const timeAt = (place) => {
    const span = merged.findLast((each) => each.x <= place) ?? merged[0];
    return span.from + (place - span.x) / pixels;
  };
  return { at, timeAt, pixels, fold, spans: merged };
}

function axis(scale, height) {
  const step = STEPS.find((each) => each * scale.pixels > 64) ?? STEPS.at(-1);
  const marks = [];
  scale.spans.forEach((span, index) => {
    let free = span.x;
    for (let time = Math.ceil(span.from / step) * step; time < span.to; time += step) {
      const x = scale.at(time);
      const text = shortTime(time, step < MINUTE);
      marks.push(svg("line", { class: "mark", x1: x, x2: x, y1: TOP - 6, y2: height }));
      const isNearNow = Math.abs(x + 14 - scale.at(now())) < 44;
      if (x < free || isNearNow || x + text.length * 6 > scale.at(span.to)) continue;
      marks.push(svg("text", { class: "time", x: x + 3, y: 15 }, text));
      free = x + text.length * 7 + 8;
    }
    const next = scale.spans[index + 1];
    if (!next) return;
    marks.push(svg("rect", { class: "fold", x: next.x - scale.fold, width: scale.fold, y: 0, height }));
    if (scale.fold < FOLD_TEXT_MIN) return;
    marks.push(svg("text", { class: "time fold", x: next.x - scale.fold / 2, y: 15, "text-anchor": "middle" },
      length(next.from - span.to).split(" ")[0]));
  });
  return svg("g", { "aria-hidden": "true" }, marks);
}

function nowLine(height) {
  return svg("g", { class: "now", "aria-hidden": "true" },
    svg("line", { y1: TOP - 4, y2: height }),
    svg("rect", { x: -16, y: 3, width: 32, height: 17, rx: 8 }),
    svg("text", { y: 15, "text-anchor": "middle" }, "now"));
}

function hatch() {
  const pattern = { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
  return svg("defs", {}, svg("pattern", pattern,
    svg("rect", { class: "hatch-ground", width: 6, height: 6 }),
    svg("line", { class: "hatch-line", x1: 0, y1: 0, x2: 0, y2: 6 })));
}

const cut = (text, most) => (text.length > most ? `${text.slice(0, Math.max(most - 1, 1))}…` : text);
