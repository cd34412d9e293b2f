// Keeps the files of the page, so that it opens, with the conversations of this browser, while the server is away.
// Whatever the page asks the server for, answers and models, is not touched.
const CACHE = "mlxr-page";
const SCOPE = new URL(self.registration.scope);

self.addEventListener("install", (event) => {
  self.skipWaiting();
  event.waitUntil(fetchIndex().catch(() => undefined));
});

self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

self.addEventListener("fetch", (event) => {
  const { request } = event;
  const { origin, pathname } = new URL(request.url);
  if (request.method !== "GET" || origin !== SCOPE.origin) return;
  if (request.mode === "navigate" && pathname === SCOPE.pathname) event.respondWith(answerIndex());
  else if (pathname.startsWith(`${SCOPE.pathname}assets/`)) event.respondWith(answerAsset(request));
});

/** The page as the server has it, or else as it was the last time. */
async function answerIndex() {
  try {
    return await fetchIndex();
  } catch (error) {
    const kept = await caches.match(SCOPE.href, { cacheName: CACHE, ignoreVary: true });
    if (kept) return kept;
    throw error;
  }
}

/** Fetch the page and keep it, with the files that it names; files of an older version are forgotten. */
async function fetchIndex() {
  const response = await fetch(SCOPE.href, { headers: { accept: "text/html" }, cache: "no-cache" });
  if (!response.ok) return response;
  const cache = await caches.open(CACHE);
  const [text, kept] = await Promise.all([response.clone().text(), cache.match(SCOPE.href, { ignoreVary: true })]);
  if (kept && (await kept.text()) === text) return response;
  await caches.delete(CACHE);
  const fresh = await caches.open(CACHE);
  const named = Array.from(text.matchAll(/(?:src|href)="\.\/([^"]+)"/g), ([, path]) => new URL(path, SCOPE).href);
  await Promise.all([fresh.put(SCOPE.href, response.clone()), fresh.addAll(named)]);
  return response;
}

/** A file whose name changes with what is in it: what is kept is right for ever. */
async function answerAsset(request) {
  const kept = await caches.match(request, { cacheName: CACHE, ignoreVary: true });
  if (kept) return kept;
  const response = await fetch(request);
  if (response.ok) await (await caches.open(CACHE)).put(request, response.clone());
  return response;
}
