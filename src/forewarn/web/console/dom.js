// Builds and updates the page. Everything is text or an attribute: no HTML is ever parsed, so a
// hostile name can do no harm, and the Content-Security-Policy forbids the rest.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  const isShown = (child) => child !== null && child !== undefined && child !== "";
  element.append(...children.flat(Infinity).filter(isShown));
  return element;
}

/** h("a", {href: "#/"}, "text", child, ...) */
export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

/** A name of the fleet. It may change the writing direction, which must not leave it. */
export function name(text) {
  return h("bdi", {}, text);
}

export function link(kind, text) {
  return h("a", { href: `#/${kind}/${encodeURIComponent(text)}` }, name(text));
}

/** Some names as links, and how many more there are. */
export function links(kind, names, most = 3) {
  const shown = names.slice(0, most).map((each, index) => [index ? ", " : "", link(kind, each)]);
  const more = names.length - most;
  return h("span", {}, shown, more > 0 ? ` and ${more} more` : "");
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Make the children of `parent` match `items`. A child is kept as long as its key is there, so
 * focus, selection and scroll position survive. `update(element, item)` is called for each.
 */
export function keyed(parent, items, keyOf, create, update = () => {}) {
  const known = parent.keyedChildren ?? new Map();
  const next = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    const element = known.get(key) ?? create(item);
    known.delete(key);
    next.set(key, element);
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
  for (const element of known.values()) element.remove();
  parent.keyedChildren = next;
}

/** Replace the children, unless what they show is the same: then focus and selection stay. */
export function show(parent, key, build) {
  if (parent.shownKey === key) return;
  parent.shownKey = key;
  const label = parent.contains(document.activeElement) && document.activeElement.textContent;
  parent.replaceChildren(...[build()].flat(Infinity).filter((child) => child !== null && child !== ""));
  const again = label && [...parent.querySelectorAll("button, a")].find((each) => each.textContent === label);
  if (again) again.focus();
}

export function button(text, onclick, properties) {
  return h("button", { type: "button", onclick, ...properties }, text);
}

/** A labelled control; its id is needed for the label. */
export function field(label, control, hint = "") {
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control,
    hint ? h("small", {}, hint) : "");
}

/**
 * A table that scrolls sideways. `cells` of a row get the column as a label, for phones. `fill` makes
 * the rows match some items; without any, `none` is shown instead.
 */
export function table(caption, columns, none = h("p")) {
  const body = h("tbody");
  const head = h("tr", {}, columns.map((column) => h("th", { scope: "col" }, column)));
  const shown = h("table", {}, h("caption", { class: "hidden" }, caption), h("thead", {}, head), body);
  const element = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, shown);
  const row = (...cells) => h("tr", {}, cells.map((cell, index) =>
    h("td", { "data-label": columns[index] }, cell)));
  const fill = (items, ...rest) => {
    none.hidden = items.length > 0;
    element.hidden = !items.length;
    keyed(body, items, ...rest);
  };
  return { element, body, row, fill, none };
}

export function definitions(pairs) {
  const shown = pairs.filter((pair) => pair);
  return h("dl", {}, shown.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value))));
}

/** What a list shows while it is empty, and what to do about it. */
export function empty(title, ...text) {
  return h("div", { class: "empty" }, h("p", {}, h("strong", {}, title)), text.length ? h("p", {}, text) : "");
}

export function badge(kind, text) {
  return h("span", { class: `badge ${kind}` }, text);
}

/** Arrow keys move the focus within a group, which is one stop of the Tab key. */
export function arrowKeys(group, selector) {
  group.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const current = document.activeElement.closest(selector);
    if (!step || !current) return;
    const all = [...group.querySelectorAll(selector)];
    const target = all[all.indexOf(current) + step];
    if (!target) return;
    event.preventDefault();
    current.setAttribute("tabindex", "-1");
    target.setAttribute("tabindex", "0");
    target.focus();
  });
}
