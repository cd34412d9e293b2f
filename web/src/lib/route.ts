import { useSyncExternalStore } from "react";

export const VIEWS = ["chat", "compare", "models", "engine", "settings"] as const;
export type View = (typeof VIEWS)[number];

/** Where the page is: `#/chat/ID` is the view "chat" with the detail "ID". */
export interface Route {
  view: View;
  detail: string;
}

/** The route that an address's fragment names; anything unknown is the chat. */
export function parseRoute(hash: string): Route {
  const [view = "", ...rest] = hash.replace(/^#\/?/, "").split("/");
  const known = VIEWS.find((name) => name === view);
  return known ? { view: known, detail: decode(rest.join("/")) } : { view: "chat", detail: "" };
}

export function routeHref(view: View, detail = ""): string {
  return detail ? `#/${view}/${encodeURIComponent(detail)}` : `#/${view}`;
}

export function go(view: View, detail = ""): void {
  location.hash = routeHref(view, detail);
}

export function useRoute(): Route {
  const hash = useSyncExternalStore(subscribe, () => location.hash);
  return parseRoute(hash);
}

function subscribe(listener: () => void): () => void {
  window.addEventListener("hashchange", listener);
  return () => window.removeEventListener("hashchange", listener);
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
