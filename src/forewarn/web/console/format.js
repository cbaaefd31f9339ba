// Times, lengths of time and numbers, as people read them. All times are the server's.

import { h, setText } from "./dom.js";

let offset = 0; // the server's clock minus this computer's, in milliseconds
let stoppedAt = null; // the time of a lab whose clock is paused

export function setServerTime(time, isRunning = true) {
  const server = new Date(time).getTime();
  // A difference below a second is the delay of the network: a countdown must not jump back.
  if (Math.abs(server - Date.now() - offset) > 1000) offset = server - Date.now();
  stoppedAt = isRunning ? null : server;
}

/** The time of the server, which decides; in a lab it may be any time. */
export function now() {
  return stoppedAt ?? Date.now() + offset;
}

/** 75_000 -> "1m 15s"; never more than two units. */
export function length(milliseconds) {
  let seconds = Math.max(0, Math.round(milliseconds / 1000));
  const parts = [];
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]]) {
    const count = Math.floor(seconds / size);
    if (count || (unit === "s" && !parts.length)) parts.push(`${count}${unit}`);
    else if (parts.length) break;
    seconds -= count * size;
    if (parts.length === 2) break;
  }
  return parts.join(" ");
}

export function fromNow(time) {
  const left = new Date(time) - now();
  if (Math.abs(left) < 500) return "now";
  return left >= 0 ? `in ${length(left)}` : `${length(-left)} ago`;
}

// Made when needed: each takes some milliseconds.
const formatter = (options) => {
  let made = null;
  return (time) => (made ??= new Intl.DateTimeFormat(undefined, options)).format(time);
};
const sameDay = formatter({ timeStyle: "medium" });
const otherDay = formatter({ dateStyle: "medium", timeStyle: "medium" });
const minutes = formatter({ timeStyle: "short" });
const weekday = formatter({ weekday: "short" });

export function clockTime(time) {
  const date = new Date(time);
  const isToday = date.toDateString() === new Date(now()).toDateString();
  return (isToday ? sameDay : otherDay)(date);
}

/** For the axis of the timeline. */
export function shortTime(time, withSeconds) {
  const isToday = new Date(time).toDateString() === new Date(now()).toDateString();
  return `${isToday ? "" : `${weekday(time)} `}${(withSeconds ? sameDay : minutes)(time)}`;
}

/** A time that says how far away it is, kept up to date by `tick`. */
export function relative(time) {
  return h("time", { datetime: time, title: clockTime(time), class: "relative" }, fromNow(time));
}

/** Called every second: the texts of all relative times on the page. */
export function tick() {
  for (const element of document.querySelectorAll("time.relative")) {
    setText(element, fromNow(element.getAttribute("datetime")));
  }
}

export function count(number, noun, many = `${noun}s`) {
  return `${number.toLocaleString()} ${number === 1 ? noun : many}`;
}

export const byName = new Intl.Collator(undefined, { numeric: true }).compare;
