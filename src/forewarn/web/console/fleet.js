// The fleet: scopes, their update domains, and a tile for each VM. A change redraws one tile. And one VM.

import { vmActions } from "./actions.js";
import { arrowKeys, badge, definitions, empty, field, h, keyed, link, name, setText, show } from "./dom.js";
import { byName, clockTime, relative } from "./format.js";
import { PROBLEMS, STATES } from "./store.js";
import { View } from "./view.js";

const CHUNK = 2000; // tiles that are made before the browser may paint
const TILE = "a.tile:not([hidden])";
const DETAILED_MAX = 400; // tiles with names; more have the shape only

export class FleetView extends View {
  build() {
    this.tiles = new Map();
    this.text = h("input", { type: "search", id: "text", placeholder: "Name or address", oninput: () => this.filter() });
    this.scope = this.select("scope", "All scopes");
    this.host = this.select("host", "All hosts");
    this.state = this.select("state", "All states");
    this.summary = h("p", { role: "status", class: "lead" });
    this.groups = h("div", { class: "fleet" });
    this.nothing = empty("No VM matches.", "Change or clear the filters.");
    arrowKeys(this.groups, TILE);
    this.legend = h("ul", { class: "legend", "aria-label": "States" });
    this.append(
      h("h1", {}, "Fleet"), this.summary,
      h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
        field("Search", this.text), field("Scope", this.scope), field("Host", this.host), field("State", this.state)),
      this.legend, this.nothing, this.groups,
    );
  }

  select(id, all) {
    return h("select", { id, onchange: () => this.filter() }, h("option", { value: "" }, all));
  }

  update({ isAll, vms = [] }) {
    if (this.layoutKey() !== this.layout) return this.draw();
    for (const vm of isAll ? this.store.vms.keys() : vms) if (this.tiles.has(vm)) this.paint(this.store.vms.get(vm));
    return this.filter();
  }

  /** Which tile is where: while this stays, tiles are repainted and not made again. */
  layoutKey() {
    return [...this.store.vms.values()].map((vm) => `${vm.name}/${vm.scope}/${vm.update_domain}`).join();
  }

  async draw() {
    const drawing = this.drawing = {};
    this.layout = this.layoutKey();
    const scopes = Map.groupBy(this.store.vms.values(), (vm) => vm.scope);
    this.setOptions(scopes);
    this.tiles = new Map();
    this.groups.replaceChildren();
    this.groups.classList.toggle("detailed", this.store.vms.size <= DETAILED_MAX);
    let made = 0;
    for (const scope of [...scopes.keys()].sort(byName)) {
      const domains = [...Map.groupBy(scopes.get(scope), (vm) => vm.update_domain)].sort(([one], [other]) => one - other);
      const rows = domains.map(([domain, vms]) => {
        made += vms.length;
        return h("div", { class: "domain" }, h("span", { class: "soft" }, `domain ${domain}`),
          h("div", { class: "tiles" }, vms.sort((one, other) => byName(one.name, other.name)).map((vm) => this.tile(vm))));
      });
      const kind = this.store.scopes.get(scope)?.kind ?? "";
      this.groups.append(h("section", { class: "card scope", "aria-label": `Scope ${scope}` },
        h("h2", {}, name(scope), " ", h("small", {}, kind)), rows));
      if (made < CHUNK) continue;
      made = 0;
      await new Promise((resume) => setTimeout(resume));
      if (!this.isConnected || this.drawing !== drawing) return;
    }
    this.filter();
  }

  setOptions(scopes) {
    const hosts = new Set([...this.store.vms.values()].map((vm) => vm.host).filter(Boolean));
    const set = (select, values, label = (value) => value) => keyed(select, ["", ...values], (value) => value,
      (value) => (value ? h("option", { value }, label(value)) : select.options[0]));
    set(this.scope, [...scopes.keys()].sort(byName));
    set(this.host, [...hosts].sort(byName));
    set(this.state, Object.keys(STATES), (state) => STATES[state].word);
  }

  tile(vm) {
    const tile = h("a", {
      class: "tile", href: `#/vms/${encodeURIComponent(vm.name)}`, tabindex: "-1", "data-name": vm.name,
    });
    this.tiles.set(vm.name, tile);
    this.paint(vm);
    return tile;
  }

  paint(vm) {
    const tile = this.tiles.get(vm.name);
    const state = this.store.stateOf(vm);
    // A second mark: an event does not hide that the host of the VM is unreachable.
    const states = this.store.isAway(vm) && state !== "unreachable" ? [state, "unreachable"] : [state];
    const word = states.map((each) => STATES[each].word).join(", ");
    const problems = this.store.problemsOf(vm).map(({ message }) => `; ${message}`).join("");
    const title = `${vm.name}: ${word}${vm.host ? `, on ${vm.host}` : ""}${problems}`;
    if (tile.title !== title) tile.title = title;
    if (tile.dataset.states === states.join(" ")) return;
    tile.className = `tile ${state}`;
    tile.dataset.state = state;
    tile.dataset.states = states.join(" ");
    tile.dataset.word = word;
    setText(tile, states.map((each) => STATES[each].shape).join(""));
    tile.setAttribute("aria-label", `${vm.name}: ${word}`);
  }

  filter() {
    const wanted = this.text.value.trim().toLowerCase();
    const [scope, host, state] = [this.scope.value, this.host.value, this.state.value];
    const counts = new Map();
    let shown = 0;
    for (const [each, tile] of this.tiles) {
      const vm = this.store.vms.get(each);
      if (!vm) continue;
      const states = tile.dataset.states.split(" ");
      const isShown = (!scope || vm.scope === scope) && (!host || vm.host === host) &&
        (!state || states.includes(state)) && (!wanted || `${vm.name} ${vm.address} ${vm.id}`.toLowerCase().includes(wanted));
      if (tile.hidden === isShown) tile.hidden = !isShown;
      if (!isShown) continue;
      shown += 1;
      states.forEach((one) => counts.set(one, (counts.get(one) ?? 0) + 1));
    }
    this.groups.classList.toggle("detailed", shown <= DETAILED_MAX);
    for (const row of this.groups.querySelectorAll(".domain, .scope")) row.hidden = !row.querySelector(TILE);
    for (const row of this.groups.querySelectorAll(".domain:not([hidden])")) {
      if (!row.querySelector(`${TILE}[tabindex="0"]`)) row.querySelector(TILE).setAttribute("tabindex", "0");
    }
    const { size } = this.store.vms;
    this.nothing.hidden = shown > 0 || !size;
    const of = shown < size ? ` of ${size.toLocaleString()}` : "";
    const text = `${shown.toLocaleString()}${of} ${size === 1 ? "VM" : "VMs"}`;
    setText(this.summary, size ? text : "There are no VMs yet. Apply a fleet file: forewarn fleet apply FILE");
    keyed(this.legend, Object.entries(STATES), ([each]) => each, ([each, { word, shape }]) => h("li", {},
      h("span", { class: `tile ${each}`, "aria-hidden": "true" }, shape), h("span", {}, word)),
    (item, [each, { word }]) => setText(item.lastChild, counts.has(each) ? `${word} ${counts.get(each).toLocaleString()}` : word));
  }
}

/** One VM: its state, where it is, its events, and what can be done. */
export class VmView extends View {
  update({ isAll, vms }) {
    if (!isAll && !vms.has(this.detail)) return;
    const vm = this.store.vms.get(this.detail);
    const state = vm && this.store.stateOf(vm);
    const events = this.store.eventsOf(this.detail);
    const problems = vm && this.store.problemsOf(vm);
    show(this, JSON.stringify([vm, state, events, problems]), () => (vm ? this.content(vm, state, events, problems) : [
      h("h1", {}, name(this.detail)),
      empty("There is no VM with this name.", "It may have been deleted: ", this.historyLink()),
    ]));
  }

  historyLink() {
    return h("a", { href: `#/history/vm=${encodeURIComponent(this.detail)}` }, "its history");
  }

  content(vm, state, events, problems) {
    const { word, shape } = STATES[state];
    return [
      h("p", { class: "crumb" }, "VM in scope ", name(vm.scope)),
      h("div", { class: "head" }, h("h1", {}, name(vm.name)), badge(state, `${shape} ${word}`)),
      vmActions(this.store, vm),
      h("div", { class: "card" }, definitions([
        problems.length ? ["Problems", h("ul", { class: "plain" }, problems.map(({ code, message }) =>
          h("li", {}, badge(PROBLEMS[code]?.state ?? "unreachable", code.replaceAll("-", " ")), " ", message)))] : null,
        ["Host", vm.host ? link("hosts", vm.host) : "none"],
        ["Scope", [name(vm.scope), `, update domain ${vm.update_domain}, fault domain ${vm.fault_domain}`]],
        ["Power", this.store.isAway(vm) ? `${vm.power} when its host was last reached` : vm.power],
        ["Address", vm.address || "none"],
        vm.id ? ["Id", h("code", {}, vm.id)] : null,
        ["Last poll", vm.seen_at ? relative(vm.seen_at) : "never: nothing in this VM reads its events"],
      ])),
      h("h2", {}, "Events"),
      events.length ? h("ul", { class: "plain" }, events.map((event) => h("li", {},
        h("a", { href: `#/events/${event.id}` }, badge(event.status === "Started" ? "impact" : "notice", event.type)),
        event.status === "Started" ? " started " : " deadline ", relative(event.started_at ?? event.not_before),
        ` (${clockTime(event.started_at ?? event.not_before)})`, event.waits_for ? `, waits for ${event.waits_for}` : "")))
        : empty("Nothing is planned for this VM."),
      h("p", {}, "What happened before: ", this.historyLink()),
    ];
  }
}
