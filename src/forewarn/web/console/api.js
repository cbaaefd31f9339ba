// Calls to the control API, and the stream of changes.

const ANSWER_MILLISECONDS_MAX = 30_000;
export const RETRY_MILLISECONDS = 2000;

export class ApiError extends Error {
  constructor(status, body) {
    super(body?.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.code = body?.error ?? "";
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

/**
 * Follow the history after the entry with this number. The browser reconnects by itself; when it has
 * given up, because the server refused, it is tried again here. Returns a function that reconnects.
 */
export function follow(number, { onEntry, onOpen, onGap }) {
  let source = null;
  const connect = () => {
    source?.close();
    const opened = source = new EventSource(`/api/v1/stream?after=${number}`);
    opened.onopen = () => onOpen(true);
    opened.onmessage = (message) => {
      number = message.lastEventId;
      onEntry(JSON.parse(message.data));
    };
    opened.addEventListener("gap", onGap);
    opened.onerror = () => {
      onOpen(false);
      if (opened.readyState === EventSource.CLOSED) setTimeout(() => opened === source && connect(), RETRY_MILLISECONDS);
    };
  };
  connect();
  return connect;
}
