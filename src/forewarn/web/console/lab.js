// The lab: its clock, faults of the endpoint, shipped scenarios, and the requests of each VM.

import { explain, mayAct, setOutcome } from "./actions.js";
import { get, path, post, put, remove } from "./api.js";
import { badge, button, empty, field, h, keyed, link, setText, table } from "./dom.js";
import { byName, clockTime } from "./format.js";
import { View } from "./view.js";

const REFRESH_MILLISECONDS = 1000;
const LOG_MAX = 200;
const ADVANCES = [["1 minute", 60], ["15 minutes", 900], ["1 hour", 3600], ["1 day", 86400]];

export class LabView extends View {
  build() {
    this.time = h("p", { class: "answer" });
    this.output = h("p", { role: "status", class: "outcome" });
    this.entries = [];
    this.append(h("h1", {}, "Lab"), h("p", { class: "lead" }, "The service with a clock and an endpoint that you control."), this.output,
      h("div", { class: "columns" }, this.clockPart(), this.faultPart()), this.scenarioPart(), this.logPart());
    for (const control of mayAct(this.store) ? [] : this.querySelectorAll(".act")) control.remove();
    this.every(REFRESH_MILLISECONDS, () => this.refresh().catch(() => {}));
  }

  clockPart() {
    this.toggle = button("Resume", () => this.act(put("clock", { is_running: !this.store.clock.is_running })));
    this.rate = h("input", { id: "rate", type: "number", min: "0.001", step: "any", value: String(this.store.clock.rate) });
    this.advances = ADVANCES.map(([label, seconds]) => button(`+ ${label}`, () => this.act(post("clock/advance", { seconds }))));
    return h("section", { class: "card", "aria-labelledby": "lab-clock" }, h("h2", { id: "lab-clock" }, "Clock"), this.time,
      h("div", { class: "actions act" }, this.toggle, this.advances),
      h("div", { class: "filters act" }, field("Rate", this.rate),
        button("Set", () => this.act(put("clock", { rate: Number(this.rate.value) })))),
      h("p", { class: "soft act" }, "The rate divides the notices and durations of new events."));
  }

  faultPart() {
    this.kind = h("select", { id: "kind", onchange: () => this.showSettings() });
    this.settings = h("input", { id: "settings", placeholder: "from=1m for=2m" });
    this.hint = h("p", { class: "soft act" });
    this.vm = h("select", { id: "vm" });
    this.faults = h("ul", { class: "plain" });
    this.noFaults = h("p", { class: "soft" }, "No fault is on: the endpoint behaves.");
    return h("section", { class: "card", "aria-labelledby": "lab-faults" }, h("h2", { id: "lab-faults" }, "Faults"),
      this.noFaults, this.faults,
      h("div", { class: "filters act" }, field("Fault", this.kind), field("VM", this.vm), field("Settings", this.settings),
        button("Switch on", () => this.addFault(), { class: "primary" })), this.hint);
  }

  scenarioPart() {
    this.scenario = h("select", { id: "scenario", onchange: () => this.showAbout() });
    this.about = h("p", { class: "soft" });
    this.report = h("pre", { tabindex: "0", role: "region", "aria-label": "Report of the scenario", hidden: true });
    this.verdict = h("p", { role: "status" });
    this.run = button("Run", () => this.runScenario(), { class: "primary" });
    return h("section", { class: "card", "aria-labelledby": "lab-scenarios" }, h("h2", { id: "lab-scenarios" }, "Scenarios"),
      h("p", {}, "A scenario brings its own VMs and runs to its end at once, in a lab of its own: the clock, the VMs and the events "
        + "of this lab stay as they are. The report says what happened and whether each expectation was met."),
      h("div", { class: "filters act" }, field("Scenario", this.scenario), this.run),
      this.about, this.verdict, this.report);
  }

  logPart() {
    this.log = table("Requests", ["When", "VM", "Request", "Status", "Faults"],
      empty("No request yet.", "Requests of VMs to the metadata endpoint appear here as they come."));
    this.log.element.classList.add("log");
    this.only = h("select", { id: "only", onchange: () => this.showLog() });
    const vms = [...this.store.vms.keys()].sort(byName);
    for (const select of [this.vm, this.only]) {
      select.append(h("option", { value: "" }, "All VMs"), ...vms.map((vm) => h("option", {}, vm)));
    }
    return h("section", { "aria-labelledby": "lab-requests" },
      h("div", { class: "head" }, h("h2", { id: "lab-requests" }, "Requests"), h("div", { class: "filters" }, field("Of", this.only))),
      this.log.none, this.log.element);
  }

  async update({ isAll }) {
    if (!isAll || this.schemas) return;
    const [schema, { scenarios }] = await Promise.all([get("faults/schema"), get("scenarios")]);
    const kinds = Object.entries(schema.discriminator.mapping);
    this.schemas = new Map(kinds.map(([kind, place]) => [kind, schema.$defs[place.split("/").at(-1)]]));
    this.kind.replaceChildren(...[...this.schemas.keys()].map((kind) => h("option", {}, kind)));
    this.scenario.replaceChildren(...scenarios.map((each) =>
      h("option", { value: each.name, "data-about": each.about }, `${each.name} (${each.lasts})`)));
    this.showSettings();
    this.showAbout();
    await this.refresh();
  }

  showSettings() {
    const { description, properties } = this.schemas.get(this.kind.value);
    const names = Object.keys(properties).filter((each) => !["fault", "vms"].includes(each));
    setText(this.hint, `${description} Settings: ${names.join(", ")}.`);
  }

  showAbout() {
    setText(this.about, this.scenario.selectedOptions[0].dataset.about);
  }

  async refresh() {
    const after = this.entries.at(-1)?.number ?? 0;
    const [faults, log] = await Promise.all([
      get("faults"), get(after ? `transcript?after=${after}` : `transcript?newest=true&limit=${LOG_MAX}`), this.store.readClock(),
    ]);
    if (!this.isConnected) return;
    const { clock } = this.store;
    setText(this.time, `${clockTime(clock.now)}, ${clock.is_running ? "running" : "paused"}, rate ${clock.rate}`);
    setText(this.toggle, clock.is_running ? "Pause" : "Resume");
    for (const control of [this.toggle, ...this.advances]) control.disabled = !clock.is_virtual;
    this.noFaults.hidden = faults.faults.length > 0;
    keyed(this.faults, faults.faults, (fault) => fault.id, (fault) => this.fault(fault));
    this.entries = [...this.entries, ...log.entries.filter((entry) => entry.kind === "request")].slice(-LOG_MAX);
    this.showLog();
  }

  fault({ id, fault, vms, begins_at: begins, ends_at: ends, requests_left: left, ...settings }) {
    const details = Object.entries(settings).map(([key, value]) => `${key} ${value}`).join(", ");
    const off = button("Switch off", () => this.act(remove(path`faults/${id}`)), { "aria-label": `Switch off ${fault}`, class: "act" });
    return h("li", {}, badge("failed", fault), ` ${details} for ${vms?.length ? vms.join(", ") : "all VMs"}`,
      ends ? ` until ${clockTime(ends)} ` : " ", mayAct(this.store) ? off : "");
  }

  showLog() {
    const shown = this.entries.filter((entry) => !this.only.value || entry.vm === this.only.value).reverse();
    this.log.fill(shown, (entry) => entry.number, (entry) => {
      const request = h("code", {}, h("bdi", { class: "text" }, `${entry.method} ${entry.path}`));
      const status = badge(entry.status === 200 ? "quiet" : "failed", String(entry.status || "none"));
      const vm = entry.vm ? link("vms", entry.vm) : "unknown";
      return this.log.row(clockTime(entry.at), vm, request, status, (entry.faults ?? []).join(", "));
    });
  }

  async act(work) {
    try {
      await work;
      setOutcome(this.output, "");
      await this.refresh();
    } catch (error) {
      setOutcome(this.output, explain(error), "bad");
    }
  }

  addFault() {
    const pairs = this.settings.value.split(/\s+/).filter(Boolean).map((each) => each.split("="));
    const settings = Object.fromEntries(pairs.map(([key, value = ""]) => [key, /^-?\d+(\.\d+)?$/.test(value) ? Number(value) : value]));
    const vms = this.vm.value ? { vms: [this.vm.value] } : {};
    return this.act(post("faults", { fault: this.kind.value, ...settings, ...vms }));
  }

  async runScenario() {
    this.run.disabled = true;
    setText(this.verdict, "Running…");
    try {
      const { is_passed: isPassed, lines } = await post(path`scenarios/${this.scenario.value}/run`);
      this.verdict.replaceChildren(badge(isPassed ? "quiet" : "failed", isPassed ? "passed" : "failed"), " ", lines.at(-1));
      setText(this.report, lines.join("\n"));
      this.report.hidden = false;
    } catch (error) {
      setText(this.verdict, explain(error));
    }
    this.run.disabled = false;
  }
}
