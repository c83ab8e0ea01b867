/**
 * Requests to the server that this page came from, with the reader's key, which is kept for the tab alone.
 */

/** Servers behind one origin are told apart by their paths. */
const KEY = `raydix-key ${new URL(".", location.href).pathname}`;

/** An answer that is an error, or none at all. */
export class ApiError extends Error {
  /**
   * @param {number} status 0 where no answer came.
   * @param {string} message
   */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Told when a request needs a key, or another one. @type {EventTarget} */
export const keys = new EventTarget();

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

/** @param {string} key Empty: forget the key. */
export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  keys.dispatchEvent(new Event("changed"));
}

/**
 * The response of a route.
 * @param {string} path Relative to the page, so that a proxy may serve it all below some path.
 * @param {RequestInit & {json?: unknown}} [options]
 * @returns {Promise<Response>}
 */
async function send(path, options = {}) {
  const headers = new Headers();
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers.set("authorization", `Bearer ${key}`);
  const init = { ...options, headers };
  if (options.json !== undefined) {
    headers.set("content-type", "application/json");
    init.body = JSON.stringify(options.json);
    init.method = "POST";
  }
  let response;
  try {
    response = await fetch(path, init);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (response.ok) return response;
  if (response.status === 401) keys.dispatchEvent(new Event("needed"));
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error?.message ?? `${response.status} ${response.statusText}`);
}

/**
 * The object of a route.
 * @param {string} path
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export const get = async (path, signal) => (await send(path, { signal })).json();

/**
 * The object that a route answers a body with.
 * @param {string} path
 * @param {unknown} json
 * @returns {Promise<any>}
 */
export const post = async (path, json) => (await send(path, { json })).json();

/**
 * The data of server-sent events; `[DONE]` is left out. `EventSource` is not used, since it sends no key.
 * @param {string} path
 * @param {{json?: unknown, signal?: AbortSignal}} [options]
 * @returns {AsyncGenerator<any>}
 */
export async function* events(path, options = {}) {
  const response = await send(path, options);
  if (response.body === null) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const lines = text.slice(0, end).split("\n");
        const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (data && data !== "[DONE]") yield JSON.parse(data);
      }
    }
  } finally {
    // The server goes on sending to a reader that nobody reads from, until it is told.
    reader.cancel().catch(() => undefined);
  }
}

/**
 * Call `look` now and then every `ms`, while the page is seen and the signal says so. A page in the background asks for
 * nothing. A look that fails, while it asks or while it draws, is told and followed by the next.
 * @param {() => Promise<void>} look
 * @param {(message: string) => void} fail
 * @param {number} ms
 * @param {AbortSignal} signal
 */
export async function poll(look, fail, ms, signal) {
  while (!signal.aborted) {
    try {
      if (!document.hidden) await look();
    } catch (error) {
      if (!signal.aborted) fail(/** @type {Error} */ (error).message);
    }
    await new Promise((resolve) => setTimeout(resolve, ms));
  }
}
