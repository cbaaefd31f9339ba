// What an operator can do. Each action says exactly what will happen and when, and asks first.

import { ApiError, get, makePostOnce, path, remove } from "./api.js";
import { button, field, h, setText } from "./dom.js";
import { clockTime, count, length } from "./format.js";
import { isOff } from "./store.js";

export function mayAct(store) {
  return store.session.role !== "viewer";
}

/** When an operation on a VM would start. */
function starts(session, type, vm, scope) {
  let seconds = session.notice_seconds[type];
  if (type === "Terminate") {
    const notice = scope.policy.terminate_notice_seconds ?? null;
    if (notice === null) return "It happens at once: the policy of its scope wants no notice.";
    seconds = notice / session.rate;
  }
  if (isOff(vm)) return "It happens at once: the VM is not running.";
  if (!scope.is_enabled) return `It happens at once, without an event: no VM of ${vm.scope} polls.`;
  return `The VMs of ${vm.scope} are notified now. It starts ${after(session, seconds)}, or earlier once it is approved.`;
}

const after = (session, seconds) =>
  `at ${clockTime(new Date(session.now).getTime() + seconds * 1000)}, in ${length(seconds * 1000)}`;

const ON_VM = {
  restart: ["Restart", "Reboot", (vm) => `${vm.name} restarts on ${vm.host || "its host"}.`],
  redeploy: ["Redeploy", "Redeploy", (vm) => `${vm.name} moves from ${vm.host || "its host"} to another host and restarts there.`],
  evict: ["Evict", "Preempt", (vm) => `${vm.name} is stopped and leaves ${vm.host || "its host"}.`],
  delete: ["Delete", "Terminate", (vm) => `${vm.name} is deleted for good. This cannot be undone.`],
};

/** The same for a VM as `warnAway` for a host. */
const warnUnreachable = ({ problems }) => {
  const problem = problems.find(({ code }) => code === "host-unreachable");
  return problem ? `Nothing can be done to it now: ${problem.message}. It may be unable to read the event, and the impact waits for the daemon.` : "";
};

export function vmActions(store, vm) {
  if (!mayAct(store)) return null;
  return h("div", { class: "actions" }, Object.entries(ON_VM).map(([verb, [label, type, what]]) => {
    const isDangerous = verb === "delete" || verb === "evict";
    return button(label, () => ask({
      title: `${label} ${vm.name}?`,
      text: async () => {
        const paths = ["session", path`vms/${vm.name}`, path`scopes/${vm.scope}`];
        const [session, fresh, scope] = await Promise.all(paths.map(get));
        return [what(fresh), starts(session, type, fresh, scope), warnUnreachable(fresh)];
      },
      label: `${label} ${vm.name}`,
      isDangerous,
      act: (postOnce) => postOnce(path`vms/${vm.name}/${verb}`),
      done: ({ event, reason, waits_for: awaited }) => (event
        ? `Announced. It starts at ${clockTime(event.not_before)}, unless it is approved earlier.`
        : `It runs ${awaited ? "" : "now, "}without an event: ${reason.message}.`) + (awaited ? ` The impact waits for ${awaited}.` : ""),
    }), { class: isDangerous ? "risky" : null });
  }));
}

export function eventActions(store, event) {
  if (!mayAct(store)) return null;
  const names = event.resources.join(", ");
  const what = `the ${event.type} of ${names}`;
  const confirm = (label, verb, text, done, isDangerous = false) => button(label, () => ask({
    title: `${label} ${what}?`,
    text: async () => [text(await get(path`events/${event.id}`))],
    label: label === "Cancel" ? "Cancel the event" : label,
    isDangerous,
    act: (postOnce) => postOnce(path`events/${event.id}/${verb}`),
    done: () => done,
  }), { "aria-label": `${label} ${what}`, class: label === "Approve" ? "primary" : null });
  if (event.status === "Started") {
    return h("div", { class: "actions" }, confirm("Complete", "complete",
      () => "The event ends now, and platform calls that still run are canceled. Do this only if you know that the impact is over.",
      "Completed.", true));
  }
  return h("div", { class: "actions" },
    event.is_approved ? null : confirm("Approve", "approve",
      (fresh) => `It starts now instead of at ${clockTime(fresh.not_before)}, for all its VMs. `
      + `If another update domain of ${event.scope} is under impact, it waits for that.`, "Approved."),
    event.type === "Terminate" ? null
      : button("Postpone", () => postpone(event), { "aria-label": `Postpone ${what}` }),
    confirm("Cancel", "cancel", () => `The VMs of ${event.scope} no longer see the event, and nothing is done to ${names}.`, "Canceled."));
}

/** A paragraph that describes what is chosen in a control. */
function describing(control, describe) {
  const text = h("p", {}, describe());
  control.addEventListener("input", () => setText(text, describe()));
  return text;
}

function postpone(event) {
  const minutes = h("input", { type: "number", min: "1", max: "10080", value: "60", required: true, id: "minutes" });
  const later = () => new Date(new Date(event.not_before).getTime() + Number(minutes.value) * 60_000);
  const describe = () => (minutes.checkValidity()
    ? `Its deadline moves from ${clockTime(event.not_before)} to ${clockTime(later())}, and cannot be moved back. Approved, it starts earlier.`
    : "Choose 1 to 10,080 minutes.");
  ask({
    title: `Postpone the ${event.type} of ${event.resources.join(", ")}?`,
    text: async () => {
      event = await get(path`events/${event.id}`);
      return [field("By how many minutes?", minutes), describing(minutes, describe)];
    },
    label: "Postpone",
    act: (postOnce) => postOnce(path`events/${event.id}/extend`, { not_before: later().toISOString() }),
    done: (result) => `Postponed to ${clockTime(result.event.not_before)}.`,
  });
}

const MAINTENANCE = {
  Freeze: (whom) => `Pauses ${whom} for some seconds.`,
  Reboot: (whom) => `Restarts ${whom}.`,
  Redeploy: (whom) => `Moves ${whom} to other hosts.`,
};

const isLeftRunning = ({ problems }) => problems.some(({ code }) => code === "left-running");

/** What an operator has to know before something is announced on a host; empty if all is well. */
function warnAway(host) {
  if (host.state === "unreachable") {
    return `Nothing can be done there now: ${host.daemon.problem}. Its VMs may be unable to read the event, and the impacts wait for the daemon.`;
  }
  return isLeftRunning(host)
    ? "Its daemon was forgotten; what may run there is left running. Its VMs may be unable to read the event, and the impacts fail unless the service can act there itself."
    : "";
}

function maintain(session, host, whom) {
  const { unmovable } = host;
  const isAway = host.state === "unreachable" || isLeftRunning(host);
  const type = h("select", { id: "type" }, Object.keys(MAINTENANCE).map((each) => h("option", {}, each)));
  const describe = () => `${MAINTENANCE[type.value](whom)} The notice begins now. It starts `
    + `${after(session, session.notice_seconds[type.value])}, or earlier once approved. Update domains of a scope take turns.`;
  return {
    text: [field("What is done to the VMs?", type), describing(type, describe), warnAway(host),
      unmovable.length ? `A Redeploy fails for ${count(unmovable.length, "VM")} that cannot move: ${unmovable[0].vm}: ${unmovable[0].why}` : ""],
    body: () => ({ type: type.value, ...(isAway ? { allow_unreachable: true } : {}) }),
  };
}

const ON_HOST = {
  maintain: ["Maintain", maintain],
  degrade: ["Report as degraded", (session, host, whom) => ({
    text: [`Moves ${whom} to other hosts. The notice begins now. It starts ${after(session, session.degraded_notice_seconds)}, `
      + "or earlier once approved. Do this if the hardware is expected to fail.", warnAway(host)],
  })],
  fail: ["Report as failed", (session, host, whom) => ({
    text: [`Restarts ${whom} on other hosts now, without notice. Do this only if ${host.name} is dead: a VM that still runs would run twice.`,
      warnAway(host)],
  })],
};

export function hostActions(store, { name: host, daemon, problems }) {
  if (!mayAct(store)) return null;
  const isLost = daemon && !daemon.is_connected;
  const isLeft = isLeftRunning({ problems });
  return h("div", { class: "actions" }, Object.entries(ON_HOST).map(([verb, [label, prepare]]) =>
    button(label, () => {
      let body = () => ({});
      ask({
        title: verb === "maintain" ? `Maintain ${host}?` : `${label}: ${host}?`,
        text: async () => {
          const [session, fresh] = await Promise.all([get("session"), get(path`hosts/${host}`)]);
          const { vms, scopes } = fresh;
          const prepared = prepare(session, fresh, `${count(vms.length, "VM")} of ${count(scopes.length, "scope")}`);
          body = prepared.body ?? body;
          const others = fresh.other_vms.length ? `VMs run on ${host} that the fleet does not have there, and are not notified: ${fresh.other_vms.slice(0, 5).join(", ")}.` : "";
          return [...(vms.length ? prepared.text : [`Nothing happens now: the fleet has no VM on ${host}.`]), others];
        },
        label,
        isDangerous: verb === "fail",
        act: (postOnce) => postOnce(path`hosts/${host}/${verb}`, body()),
        done: ({ events, warnings }) => [events.length ? `${count(events.length, "event")} announced.` : "No VM was concerned.",
          ...warnings.map((warning) => `${warning}.`)].join(" "),
      });
    }, { class: verb === "fail" ? "risky" : null })), isLost ? button("Forget its daemon", () => forget(host), { class: "risky" }) : "",
  isLeft ? button("Forget it as fenced", () => forget(host, { isLeftRunning: true }), { class: "risky" }) : "");
}

const FORGET = {
  fenced: ["They are off, and stay off there", (host) => `They become stopped, and may be started on other hosts. Do this only if ${host} is`
    + " switched off, or reaches neither the network nor the disks: a VM that still runs would run twice."],
  still_running: ["They may run: only the daemon goes", (host) => `They stay on ${host} with unknown power, and nothing starts them elsewhere,`
    + " nor another VM that may have been moved there."],
};

function forget(host, { isLeftRunning = false } = {}) {
  const known = h("select", { id: "known" }, Object.entries(FORGET).map(([value, [label]]) => h("option", { value }, label)));
  known.value = isLeftRunning ? "fenced" : "still_running";
  ask({
    title: isLeftRunning ? `Forget ${host} as fenced?` : `Forget the daemon of ${host}?`,
    text: async () => {
      const { vms } = await get(path`hosts/${host}`);
      return [isLeftRunning ? "Its daemon was forgotten, and nothing that may run there is started elsewhere until a daemon reports, or you say that it is off."
        : "Do this when the daemon does not come back, or when another machine takes the name of the host. Its VMs stay in the fleet.",
        field(vms.length ? `What is known of its ${count(vms.length, "VM")}?` : "What is known of VMs there?", known),
        describing(known, () => FORGET[known.value][1](host))];
    },
    label: "Forget it",
    isDangerous: true,
    act: () => remove(path`hosts/${host}/daemon` + `?${known.value}=true`),
    done: () => "Forgotten.",
  });
}

/**
 * A dialog that says what will happen, does it, and shows the result or what to do about it. `text`
 * is called when it opens: what the page has may be minutes old, and the dialog makes a promise.
 */
export function ask({ title, text, label, act, done, isDangerous = false }) {
  const opener = document.activeElement;
  const postOnce = makePostOnce();
  const output = h("p", { role: "status", class: "outcome" });
  const confirm = h("button", { type: "submit", class: isDangerous ? "danger" : "primary", disabled: true }, label);
  const facts = h("div", { class: "facts" });
  const close = button("Not now", () => dialog.close());
  const form = h("form", { method: "dialog", onsubmit: submit },
    h("h2", { id: "ask" }, title),
    facts, output, h("div", { class: "actions" }, confirm, close));
  const dialog = h("dialog", { "aria-labelledby": "ask" }, form);
  async function describe() {
    try {
      facts.replaceChildren(...(await text()).filter(Boolean).map((part) => (typeof part === "string" ? h("p", {}, part) : part)));
      confirm.disabled = false;
    } catch (error) {
      setOutcome(output, explain(error), "bad");
    }
  }
  async function submit(event) {
    event.preventDefault();
    confirm.disabled = true;
    setOutcome(output, "Working…");
    try {
      setOutcome(output, done(await act(postOnce)), "good");
      confirm.remove();
      close.textContent = "Close";
      close.focus();
    } catch (error) {
      setOutcome(output, explain(error), "bad");
      confirm.disabled = false;
    }
  }
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (opener?.isConnected) opener.focus();
    else document.querySelector("main").focus();
  });
  document.body.append(dialog);
  dialog.showModal();
  close.focus();
  describe();
}

export function setOutcome(output, text, kind = "") {
  output.className = `outcome ${kind}`;
  output.textContent = text;
}

const NEXT = {
  0: "Check that the service runs and that you can reach it, then try again.",
  401: "Sign in again.",
  403: "Ask a user with the role operator.",
  event_ended: "There is nothing left to do.",
  404: "It is gone, or its name is wrong.",
  429: "Wait a few seconds, then try again.",
  500: "This is a defect: see the log of the service.",
  503: "Try again in a few seconds.",
};

/** An error in words, and what to do next. */
export function explain(error) {
  if (!(error instanceof ApiError)) throw error;
  const message = error.message.replace(/\.$/, "");
  return `${message[0].toUpperCase()}${message.slice(1)}. ${NEXT[error.code] ?? NEXT[error.status] ?? ""}`.trim();
}

export async function signOut() {
  await remove("session");
  location.reload();
}
