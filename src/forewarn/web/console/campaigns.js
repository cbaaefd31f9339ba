// Campaigns: waves planned against done, what the next host waits for, and a preview before the start.

import { ask, explain, mayAct } from "./actions.js";
import { get, path, post } from "./api.js";
import { badge, button, definitions, empty, field, h, link, name, setText, show, table } from "./dom.js";
import { clockTime, count, relative } from "./format.js";
import { View } from "./view.js";

const REFRESH_MILLISECONDS = 5000; // what a host waits for changes without an entry in the history
const BADGES = { running: "impact", paused: "notice", done: "quiet", canceled: "stopped" };

function bar({ hosts }) {
  return h("progress", { value: hosts.done, max: hosts.total, "aria-label": `${hosts.done} of ${hosts.total} hosts are done` });
}

export class CampaignsView extends View {
  build() {
    this.rows = table("Campaigns", ["Campaign", "State", "Progress", "Failed", "Started", "Ends"], empty(
      "There are no campaigns yet.",
      "A campaign takes many hosts through maintenance, a few at a time, within the limits of each scope."));
    const plan = h("a", { class: "button primary", href: "#/campaigns/new" }, "Plan a campaign");
    this.append(h("div", { class: "head" }, h("h1", {}, "Campaigns"), mayAct(this.store) ? plan : ""),
      this.rows.none, this.rows.element);
    this.every(REFRESH_MILLISECONDS, () => this.redraw({ campaigns: true }));
  }

  async update({ isAll, campaigns }) {
    if (!isAll && !campaigns) return;
    const list = (await get("campaigns?limit=100")).campaigns;
    this.rows.fill(list, (each) => each.id, (each) => this.rows.row(
      [h("a", { href: `#/campaigns/${each.id}` }, name(each.name || each.id)),
        h("small", {}, `${each.type} of ${count(each.hosts.total, "host")}`)],
      "", "", "", clockTime(each.started_at), ""), (row, each) => {
      const [, state, progress, failed, , end] = row.children;
      show(state, each.state, () => badge(BADGES[each.state], each.state));
      show(progress, JSON.stringify(each.hosts), () => [bar(each), h("small", {}, `${each.hosts.done} of ${each.hosts.total} done`)]);
      setText(failed, String(each.hosts.failed));
      const estimate = each.estimated_end ? `probably ${clockTime(each.estimated_end)}` : "not known";
      setText(end, each.ended_at ? clockTime(each.ended_at) : estimate);
    });
  }
}

export class CampaignView extends View {
  build() {
    this.every(REFRESH_MILLISECONDS, () => this.redraw({ campaigns: true }));
  }

  async update({ isAll, campaigns }) {
    if (!isAll && !campaigns) return;
    const campaign = await get(path`campaigns/${this.detail}`);
    show(this, JSON.stringify(campaign), () => this.content(campaign));
  }

  content(campaign) {
    const { hosts, waves_done: done } = campaign;
    const waves = done === null ? "" : `, ${done} of ${count(campaign.waves, "planned wave")} over`;
    const estimate = campaign.estimated_end
      ? ["probably ", relative(campaign.estimated_end), ` (${clockTime(campaign.estimated_end)})`] : "not known while it is paused";
    const waitsFor = campaign.waiting_for || (campaign.state === "paused" ? "somebody to resume the campaign" : "nothing");
    const most = campaign.max_unavailable;
    const limit = most === null ? "" : `; at most ${Number.isInteger(most) ? count(most, "VM") : `${most} of the VMs`} of a scope down`;
    const counts = ["done", "in_progress", "waiting", "skipped", "failed"];
    return [
      h("p", { class: "crumb" }, h("a", { href: "#/campaigns" }, "Campaigns")),
      h("div", { class: "head" }, h("h1", {}, name(campaign.name || campaign.id)), badge(BADGES[campaign.state], campaign.state)),
      this.actions(campaign),
      h("div", { class: "card" },
        h("p", { class: "answer" }, `${hosts.done} of ${count(hosts.total, "host")} done${campaign.state === "canceled" ? "; the others were canceled" : waves}`),
        bar(campaign),
        h("ul", { class: "legend" }, counts.map((each) => h("li", {}, `${hosts[each]} ${each.replace("_", " ")}`))),
        definitions([
          campaign.pause_reason ? ["Paused because", campaign.pause_reason] : null,
          campaign.ended_at ? null : ["Next host waits for", waitsFor],
          ["Maintenance", campaign.type],
          ["Hosts", campaign.patterns.join(", ")],
          ["At a time", `${count(campaign.max_hosts, "host")}${limit}`],
          ["Started", clockTime(campaign.started_at)],
          ["Ends", campaign.ended_at ? ["ended ", relative(campaign.ended_at)] : estimate],
        ])),
      h("h2", {}, "Hosts"),
      this.hostTable(campaign),
    ];
  }

  /** Hosts with a problem, in progress, waiting, and done, the newest first. */
  hostTable(campaign) {
    const rows = table("Hosts", ["Host", "State", "Details"]);
    const row = (host, kind, state, ...details) => rows.body.append(rows.row(link("hosts", host), badge(kind, state), details));
    for (const { host, is_failed: isFailed, why } of campaign.skipped_hosts) {
      row(host, isFailed ? "failed" : "notice", isFailed ? "failed" : "skipped", why);
    }
    for (const run of campaign.in_progress) {
      row(run.host, "impact", run.phase, `waits for ${run.waiting_for}`, run.until ? [" ", relative(run.until)] : "");
    }
    for (const host of campaign.waiting_hosts) row(host, "stopped", "waiting", "");
    for (const { host, at } of campaign.done_hosts.toReversed()) row(host, "quiet", "done", relative(at), ` (${clockTime(at)})`);
    const left = campaign.hosts.total - rows.body.rows.length;
    return [rows.element, left > 0 ? h("p", { class: "soft" }, `${count(left, "host")} not shown; the `,
      h("a", { href: "#/history/what=campaign" }, "history"), " has all.") : ""];
  }

  actions(campaign) {
    if (!mayAct(this.store) || campaign.ended_at) return null;
    const act = (verb, label, text, properties = {}) => button(label, () => ask({
      title: `${label} ${campaign.name || "this campaign"}?`,
      text: () => [text],
      label: verb === "cancel" ? "Cancel the campaign" : label,
      isDangerous: verb === "cancel",
      act: (postOnce) => postOnce(path`campaigns/${campaign.id}/${verb}`),
      done: () => "Done.",
    }), properties);
    return h("div", { class: "actions" },
      campaign.state === "paused"
        ? act("resume", "Resume", "The next hosts start as the limits allow. Failed hosts are not tried again.", { class: "primary" })
        : act("pause", "Pause", "No further host starts. Hosts whose VMs were notified continue."),
      act("cancel", "Cancel", "Events that have not started are canceled, and no further host starts. It cannot be resumed.", { class: "risky" }));
  }
}

export class NewCampaignView extends View {
  build() {
    const input = (id, properties) => h("input", { id, name: id, ...properties });
    const types = ["Freeze", "Reboot", "Redeploy"].map((type) => h("option", {}, type));
    this.plan = h("section", { role: "status" });
    this.append(
      h("p", { class: "crumb" }, h("a", { href: "#/campaigns" }, "Campaigns")),
      h("h1", {}, "Plan a campaign"),
      h("form", { class: "card stacked", onsubmit: (event) => this.preview(event), oninput: () => this.plan.replaceChildren() },
        field("Hosts", input("hosts", { required: true, placeholder: "rack-3-*, host-17" }), "Names or patterns, separated by commas."),
        field("Maintenance", h("select", { id: "type", name: "type" }, types),
          "Freeze pauses the VMs for seconds, Reboot restarts them, Redeploy moves them."),
        field("Name", input("name", { maxlength: "64", placeholder: "Kernel update" }), "Optional; the history shows it."),
        field("Hosts at a time", input("max_hosts", { type: "number", min: "1", value: "1", required: true })),
        field("VMs of a scope that may be down", input("max_unavailable", { placeholder: "1 or 20%" }),
          "Optional: a number or a percentage. Empty: as each scope's policy says."),
        h("div", { class: "actions" }, h("button", { type: "submit", class: "primary" }, "Preview the plan"))),
      this.plan);
  }

  async preview(event) {
    event.preventDefault();
    const body = Object.fromEntries([...new FormData(event.target)].map(([key, value]) => [key, value.trim()]));
    body.hosts = body.hosts.split(",").map((each) => each.trim()).filter(Boolean);
    body.max_hosts = Number(body.max_hosts);
    const down = body.max_unavailable;
    body.max_unavailable = down === "" ? null : /^\d+$/.test(down) ? Number(down) : down;
    try {
      const { plan, warnings } = await post("campaigns", { ...body, plan: true });
      this.plan.replaceChildren(...this.planned(plan, warnings, body));
    } catch (error) {
      this.plan.replaceChildren(h("p", { class: "outcome bad", role: "alert" }, explain(error)));
    }
  }

  planned(plan, warnings, body) {
    const size = ({ waiting, waves }) => `${count(waves.flat().length, "host")} in ${count(waves.length, "wave")}`
      + (waiting.length ? `, and ${count(waiting.length, "host")} later` : "");
    const blocked = (title, hosts) => (hosts.length ? [h("h2", {}, title),
      h("ul", {}, hosts.map(({ host, why }) => h("li", {}, link("hosts", host), `: ${why}`)))] : []);
    let away = 0; // hosts, as the dialog says
    const start = button("Start the campaign", () => ask({
      title: `Start this ${body.type} campaign?`,
      text: async () => {
        const fresh = await post("campaigns", { ...body, plan: true });
        away = fresh.plan.unreachable.length;
        return [`${size(fresh.plan)}. The VMs of the first wave are notified now. Each host starts when its notice has passed `
          + "or its VMs have approved; the next hosts follow as the limits allow.",
        ...fresh.warnings.map((warning) => `${warning}.`).slice(0, 5),
        away ? `Nothing can be done on ${count(away, "host")} now: VMs there may be unable to read an event, and the impacts wait.` : ""];
      },
      label: "Start",
      act: (postOnce) => postOnce("campaigns", away ? { ...body, allow_unreachable: true } : body),
      done: (result) => {
        location.hash = `#/campaigns/${result.campaign.id}`;
        return "Started.";
      },
    }), { class: "primary" });
    return [
      h("h2", {}, `The plan: ${size(plan)}`),
      h("ol", { class: "waves" }, plan.waves.map((wave, index) => h("li", { class: "card" },
        h("strong", {}, `Wave ${index + 1}`), " ", wave.map((host, place) => [place ? ", " : "", link("hosts", host)])))),
      ...blocked("These wait until they can start", plan.waiting),
      ...blocked("Too large: leave these out, or allow more VMs to be down", plan.too_large),
      ...blocked("Unreachable: nothing can be done there at present", plan.unreachable),
      ...blocked("VMs that cannot move", plan.unmovable.map(({ host, vm, why }) => ({ host, why: `${vm}: ${why}` }))),
      ...(warnings.length ? [h("h2", {}, "VMs that are not notified"), h("ul", {}, warnings.map((warning) => h("li", {}, warning)))] : []),
      h("div", { class: "actions" }, plan.too_large.length || !mayAct(this.store) ? "" : start),
    ];
  }
}
