// The frame of the page: sign-in, navigation, and whether what it shows is live.

import { explain, signOut } from "./actions.js";
import { ApiError, post, RETRY_MILLISECONDS } from "./api.js";
import { button, field, h, name, setText } from "./dom.js";
import { clockTime, tick } from "./format.js";
import { CampaignsView, CampaignView, NewCampaignView } from "./campaigns.js";
import { EventView } from "./event.js";
import { FleetView, VmView } from "./fleet.js";
import { HistoryView } from "./history.js";
import { HostsView, HostView } from "./host.js";
import { LabView } from "./lab.js";
import { NowView } from "./now.js";
import { Store } from "./store.js";

// A view is a custom element. It gets the store and the part of the address after its name.
const VIEWS = [
  ["", "Now", NowView],
  ["fleet", "Fleet", FleetView],
  ["hosts", "Hosts", HostsView],
  ["campaigns", "Campaigns", CampaignsView],
  ["history", "History", HistoryView],
  ["lab", "Lab", LabView],
];
const DETAILS = { vms: VmView, hosts: HostView, events: EventView, campaigns: CampaignView };
const PARENTS = { vms: "fleet", events: "" };

for (const view of [...VIEWS.map((each) => each[2]), ...Object.values(DETAILS), NewCampaignView]) {
  customElements.define(`console-${view.name.toLowerCase()}`, view);
}
const [main, nav, live, who] = ["main", "nav", "#live", "#who"].map((each) => document.querySelector(each));
const store = new Store();
let isSigningOut = false; // then a request that gets a 401 is no surprise

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // an address that was typed by hand
  }
}

function findView(kind, detail) {
  if (kind === "campaigns" && detail === "new") return NewCampaignView;
  const listed = VIEWS.find(([each]) => each === kind)?.[2];
  return (detail && DETAILS[kind]) || listed || NowView;
}

function route() {
  const [kind, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const detail = decode(rest.join("/"));
  const view = new (findView(kind, detail))();
  view.store = store;
  view.detail = detail;
  main.removeAttribute("data-ready");
  main.replaceChildren(view);
  const title = VIEWS.find(([each]) => each === (PARENTS[kind] ?? kind))?.[1] ?? "Now";
  document.title = `${detail ? `${detail} · ` : ""}${title} · Forewarn`;
  for (const each of nav.querySelectorAll("a")) each.ariaCurrent = each.textContent === title ? "page" : null;
}

function showFrame() {
  const shown = VIEWS.filter(([kind]) => kind !== "lab" || store.session.is_lab);
  const items = shown.map(([kind, label]) => h("li", {}, h("a", { href: `#/${kind}` }, label)));
  nav.replaceChildren(h("ul", {}, items));
  const { is_required: isRequired, name: user, role, version } = store.session;
  who.replaceChildren(...(isRequired
    ? [name(user.replace(/^token /, "")), ` (${role}) `, button("Sign out", leave, { class: "plain" })]
    : ["No sign-in: there are no tokens."]), h("small", {}, `Version ${version}`));
}

/** The page is loaded again if that succeeds. */
async function leave() {
  isSigningOut = true;
  try {
    await signOut();
  } catch (error) {
    isSigningOut = false;
    throw error;
  }
}

function showLive() {
  const { isLive, staleSince, crowd } = store;
  live.className = isLive ? "live" : staleSince ? "stale" : "crowded";
  setText(live, isLive ? "Live" : staleSince ? `Connection lost. Stale since ${clockTime(staleSince)}; trying again…`
    : `Not live, read every 20 seconds: ${crowd}. Close other tabs or windows of this console.`);
}

function showSignIn() {
  const token = h("input", { type: "password", id: "token", autocomplete: "current-password", required: true, placeholder: "fw_…" });
  const output = h("p", { role: "alert", class: "outcome bad" }, history.state?.hasEnded ? "Your session has ended. Sign in again." : "");
  async function submit(event) {
    event.preventDefault();
    try {
      await post("session", { token: token.value.trim() });
      history.replaceState(null, "");
      await start();
    } catch (error) {
      output.textContent = error.status === 401
        ? "This token is unknown, revoked or expired. Check that you copied all of it." : explain(error);
      token.select();
    }
  }
  nav.replaceChildren();
  who.replaceChildren();
  setText(live, "Signed out");
  main.replaceChildren(h("form", { class: "sign-in card", onsubmit: submit },
    h("h1", {}, "Sign in"),
    field("Token", token),
    h("button", { type: "submit", class: "primary" }, "Sign in"), output,
    h("p", { class: "soft" }, "No token yet? An admin makes one: ", h("code", {}, "forewarn token create NAME --role viewer"))));
  main.setAttribute("data-ready", "");
  token.focus();
}

async function start() {
  try {
    await store.start();
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) return showSignIn();
    main.replaceChildren(h("h1", {}, "Not available"), h("p", { role: "alert" }, explain(error)));
    return setTimeout(start, RETRY_MILLISECONDS);
  }
  showFrame();
  route();
  return window.addEventListener("hashchange", () => {
    if (location.hash === "#main") return; // the link that skips the navigation
    route();
    main.focus({ preventScroll: true });
    window.scrollTo(0, 0);
  });
}

store.addEventListener("live", showLive);
store.addEventListener("signed-out", () => {
  if (isSigningOut) return;
  history.replaceState({ hasEnded: true }, "");
  location.reload();
});
setInterval(tick, 1000);
start();
