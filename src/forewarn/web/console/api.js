// Calls to the control API, and the stream of changes.

const ANSWER_MILLISECONDS_MAX = 30_000;
const SILENCE_MILLISECONDS_MAX = 32_000; // two heartbeats of the stream, and the way of the second
export const RETRY_MILLISECONDS = 2000;

export class ApiError extends Error {
  constructor(status, body) {
    super(body?.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.code = body?.error ?? "";
    this.facts = body?.facts ?? {};
  }
}

async function request(method, path, body, headers = {}) {
  const options = { method, headers, credentials: "same-origin", cache: "no-store" };
  options.signal = AbortSignal.timeout(ANSWER_MILLISECONDS_MAX);
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  let text;
  try {
    response = await fetch(`/api/v1/${path}`, options);
    text = await response.text();
  } catch {
    throw new ApiError(0, { message: "the server does not answer" });
  }
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    // a proxy's error page, perhaps: the status says enough
  }
  if (!response.ok) throw new ApiError(response.status, value);
  return value;
}

export const get = (path) => request("GET", path);
export const post = (path, body = {}, headers = {}) => request("POST", path, body, headers);
export const put = (path, body) => request("PUT", path, body);
export const remove = (path) => request("DELETE", path);

/**
 * Makes a POST that is executed once, however often it is tried. A lost reply keeps the key; after a
 * refusal, or for another body, the next try is a new operation.
 */
export function makePostOnce() {
  let [known, key] = [null, null];
  return async (path, body = {}) => {
    const text = JSON.stringify([path, body]);
    if (text !== known) key = crypto.getRandomValues(new Uint32Array(4)).join("-");
    known = text;
    try {
      return await post(path, body, { "Idempotency-Key": key });
    } catch (error) {
      if (error.status >= 400 && error.status < 500) known = null;
      throw error;
    }
  };
}

/** A path of the API with names in it, which may have any character. */
export function path(strings, ...names) {
  return String.raw({ raw: strings }, ...names.map(encodeURIComponent));
}

/** All pages of a list, up to a number of items. */
export async function getAll(list, { limit = 10_000, max = Infinity, query = "" } = {}) {
  const items = [];
  let cursor = "";
  do {
    const page = await get(`${list}?limit=${limit}${query}${cursor}`);
    for (const item of page[list]) items.push(item);
    cursor = page.next ? `&cursor=${encodeURIComponent(page.next)}` : "";
  } while (cursor && items.length < max);
  return items;
}

/** Some items of a list; what does not exist is left out. */
export async function getSome(list, names) {
  if (!names.size) return [];
  const parameter = list === "events" ? "ids" : "names";
  return (await get(`${list}?${parameter}=${[...names].map(encodeURIComponent)}`))[list];
}

/** Read the stream until it ends. The server sends messages that are separated by empty lines. */
async function readStream(number, signal, onMessage) {
  const response = await fetch(`/api/v1/stream?after=${number}`, { cache: "no-store", signal });
  if (!response.ok) throw new ApiError(response.status, await response.json().catch(() => null));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part = await reader.read(); !part.done; part = await reader.read()) {
    const messages = (rest + part.value).split("\n\n");
    rest = messages.pop();
    for (const message of messages) {
      const fields = message.split("\n").map((line) => line.split(/: (.*)/s));
      onMessage(Object.fromEntries(fields));
    }
  }
}

/**
 * Follow the history after the entry with this number, while the page is visible: each browser and
 * each token may have a few streams only. A stream without a heartbeat is lost, whatever the network
 * says. `onLost` returns when to try again.
 */
export function follow(number, { onOpen, onEntry, onGap, onLost }) {
  let current = null;
  const connect = async () => {
    current?.abort();
    const attempt = current = new AbortController();
    let silence = null;
    const take = ({ id, event, data, retry }) => {
      clearTimeout(silence);
      silence = setTimeout(() => attempt.abort(), SILENCE_MILLISECONDS_MAX);
      if (retry) onOpen(); // the first message has it
      number = id ?? number;
      if (event === "gap") onGap();
      else if (data) onEntry(JSON.parse(data));
    };
    take({});
    let error = null;
    if (!document.hidden) await readStream(number, attempt.signal, take).catch((each) => { error = each; });
    clearTimeout(silence);
    if (attempt !== current) return;
    const wait = onLost(error);
    if (!document.hidden) setTimeout(() => attempt === current && connect(), wait);
  };
  document.addEventListener("visibilitychange", connect);
  connect();
}
