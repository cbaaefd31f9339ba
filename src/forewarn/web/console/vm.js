// One VM: its state, where it is, its events, and what can be done.

import { vmActions } from "./actions.js";
import { badge, definitions, empty, h, link, name, show } from "./dom.js";
import { clockTime, relative } from "./format.js";
import { STATES } from "./store.js";
import { View } from "./view.js";

export class VmView extends View {
  update({ isAll, vms }) {
    if (!isAll && !vms.has(this.detail)) return;
    const vm = this.store.vms.get(this.detail);
    const state = vm && this.store.stateOf(vm);
    const events = this.store.eventsOf(this.detail);
    show(this, JSON.stringify([vm, state, events]), () => (vm ? this.content(vm, state, events) : [
      h("h1", {}, name(this.detail)),
      empty("There is no VM with this name.", "It may have been deleted: ", this.historyLink()),
    ]));
  }

  historyLink() {
    return h("a", { href: `#/history/vm=${encodeURIComponent(this.detail)}` }, "its history");
  }

  content(vm, state, events) {
    const { word, shape } = STATES[state];
    return [
      h("p", { class: "crumb" }, "VM in scope ", name(vm.scope)),
      h("div", { class: "head" }, h("h1", {}, name(vm.name)), badge(state, `${shape} ${word}`)),
      vmActions(this.store, vm),
      h("div", { class: "card" }, definitions([
        ["Host", vm.host ? link("hosts", vm.host) : "none"],
        ["Scope", [name(vm.scope), `, update domain ${vm.update_domain}, fault domain ${vm.fault_domain}`]],
        ["Power", vm.power],
        ["Address", vm.address || "none"],
        vm.id ? ["Id", h("code", {}, vm.id)] : null,
        ["Last poll", vm.seen_at ? relative(vm.seen_at) : "never: nothing in this VM reads its events"],
      ])),
      h("h2", {}, "Events"),
      events.length ? h("ul", { class: "plain" }, events.map((event) => h("li", {},
        h("a", { href: `#/events/${event.id}` }, badge(event.status === "Started" ? "impact" : "notice", event.type)),
        event.status === "Started" ? " started " : " starts at the latest ", relative(event.started_at ?? event.not_before),
        ` (${clockTime(event.started_at ?? event.not_before)})`)))
        : empty("Nothing is planned for this VM."),
      h("p", {}, "What happened before: ", this.historyLink()),
    ];
  }
}
