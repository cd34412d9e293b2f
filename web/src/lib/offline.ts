/** Have the browser keep the page's files (public/sw.js), where the address is one for which it does that. */
export function keepForOffline(): void {
  if (!import.meta.env.PROD || !("serviceWorker" in navigator)) return;
  window.addEventListener("load", () => {
    navigator.serviceWorker.register("./sw.js").catch(() => undefined); // the page does without
  });
}
