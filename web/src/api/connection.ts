import { useEffect } from "react";
import { createStore, useStore } from "../lib/store";

/** Whether the server answers. */
export const connection = createStore<"unknown" | "online" | "lost">("unknown");

const EVERY_MS = 4_000;
const LOST_MS = 1_500;

/** Ask the server for a sign of life, now and then while the tab is seen, more often while it is lost. */
export function useWatchedConnection(onReturn: () => void): void {
  useEffect(() => {
    let timer = 0;
    let ended = false;
    const check = async () => {
      window.clearTimeout(timer);
      const online = document.hidden ? connection.get() !== "lost" : await answers();
      if (ended) return;
      const returned = online && connection.get() === "lost";
      connection.set(online ? "online" : "lost");
      if (returned) onReturn();
      timer = window.setTimeout(check, online ? EVERY_MS : LOST_MS);
    };
    void check();
    const checkNow = () => void check();
    document.addEventListener("visibilitychange", checkNow);
    window.addEventListener("online", checkNow);
    return () => {
      ended = true;
      window.clearTimeout(timer);
      document.removeEventListener("visibilitychange", checkNow);
      window.removeEventListener("online", checkNow);
    };
  }, [onReturn]);
}

export function useConnection() {
  return useStore(connection);
}

async function answers(): Promise<boolean> {
  try {
    const response = await fetch("/health", { cache: "no-store", signal: AbortSignal.timeout(5_000) });
    return response.status < 500;
  } catch {
    return false;
  }
}
