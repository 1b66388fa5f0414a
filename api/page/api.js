// Calls to the API. The key is kept for this tab only, and goes nowhere but into a header.

const NAME = "longhaul-key";
const PATIENCE_MS = 60_000;

export const SILENT = "The API does not answer.";

export const key = {
  get: () => sessionStorage.getItem(NAME),
  set: (value) => sessionStorage.setItem(NAME, value),
  forget: () => sessionStorage.removeItem(NAME),
};

export class ApiError extends Error {
  constructor(status, message, { retrySeconds, code } = {}) {
    super(message);
    this.status = status;
    this.retrySeconds = retrySeconds;
    this.code = code;
  }

  // What is wrong. What to do when something is away, the page does by itself.
  get problem() {
    return this.status === 503 ? this.message.replace(/(?<=\.) .*$/s, "") : this.message;
  }
}

export function headers(more = {}) {
  return key.get() ? { Authorization: `Bearer ${key.get()}`, ...more } : more;
}

export async function failure(response) {
  let said = {};
  try {
    said = (await response.json()).error ?? {};
  } catch {
    // A proxy's own page: the status has to do.
  }
  return new ApiError(response.status, said.message || `The API answered ${response.status}.`,
    { code: said.code, retrySeconds: Number(response.headers.get("Retry-After")) || 5 });
}

export async function call(path, { method = "GET", signal } = {}) {
  const signals = [AbortSignal.timeout(PATIENCE_MS), ...(signal ? [signal] : [])];
  let response;
  try {
    response = await fetch(`v1/${path}`, { method, headers: headers(), cache: "no-store", signal: AbortSignal.any(signals) });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, SILENT, { retrySeconds: 3 });
  }
  if (!response.ok) throw await failure(response);
  return response.json();
}

// What a command needs to find this server.
export function urlOption() {
  const { origin, pathname } = location;
  return origin === "http://127.0.0.1:8000" ? "" : ` --url ${origin}${pathname.replace(/\/$/, "")}`;
}

// Saved by way of memory: a link could not send the key.
export async function download(fileId, filename, progress) {
  const response = await fetch(`v1/files/${encodeURIComponent(fileId)}/content`, { headers: headers() });
  if (!response.ok) throw await failure(response);
  const total = Number(response.headers.get("Content-Length")) || 0;
  let loaded = 0;
  const counted = new TransformStream({
    transform(chunk, controller) {
      loaded += chunk.byteLength;
      progress(loaded, total);
      controller.enqueue(chunk);
    },
  });
  const blob = await new Response(response.body.pipeThrough(counted)).blob();
  const url = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = url;
  link.download = filename;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
