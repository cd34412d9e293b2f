import { useEffect, useRef, useState } from "react";
import { describeError, isAbort, send } from "../api/client";
import type { Change, Snapshot } from "../api/live";
import { readEvents } from "../api/sse";
import { applyChange, type Live, takeSnapshot } from "./liveState";

export interface Watching {
  live: Live | null;
  state: "connecting" | "live" | "paused" | "lost";
  /** Why there is nothing to see. */
  problem: string | null;
}

const AGAIN_MS = 2_000;

/** Watch an engine for as long as the view is open, not paused and seen; connects again when the stream breaks. */
export function useLive(model: string, isPaused: boolean): Watching {
  const [watching, setWatching] = useState<Watching>({ live: null, state: "connecting", problem: null });
  const last = useRef<Live | null>(null);
  const isSeen = useIsSeen();
  useEffect(() => {
    if (isPaused || !isSeen) {
      setWatching((before) => ({ ...before, state: "paused" }));
      return;
    }
    const stop = new AbortController();
    let timer = 0;
    const connect = async () => {
      setWatching((before) => ({ ...before, state: before.state === "lost" ? "lost" : "connecting" }));
      try {
        await follow(model, stop.signal, last.current, (live) => {
          last.current = live;
          setWatching({ live, state: "live", problem: null });
        });
      } catch (error) {
        if (isAbort(error) || stop.signal.aborted) return;
        setWatching((before) => ({ ...before, state: "lost", problem: describeError(error) }));
      }
      if (!stop.signal.aborted) timer = window.setTimeout(() => void connect(), AGAIN_MS);
    };
    void connect();
    return () => {
      stop.abort();
      window.clearTimeout(timer);
    };
  }, [model, isPaused, isSeen]);
  return watching;
}

async function follow(
  model: string,
  signal: AbortSignal,
  before: Live | null,
  show: (live: Live) => void,
): Promise<void> {
  const query = model ? `?model=${encodeURIComponent(model)}` : "";
  const response = await send(`/v1/admin/live${query}`, { signal, reads: true });
  let live = before;
  for await (const { event, data } of readEvents(response)) {
    const value: unknown = JSON.parse(data);
    if (event === "snapshot") live = takeSnapshot(value as Snapshot, live);
    else if (event === "change" && live) live = applyChange(live, value as Change, performance.now());
    else if (event === "error")
      throw new Error((value as { error?: { message?: string } }).error?.message ?? "The server ended the stream.");
    if (live) show(live);
  }
  throw new Error("The connection to the server broke.");
}

/** Whether the tab is seen; one that is not watches nothing. */
function useIsSeen(): boolean {
  const [isSeen, setSeen] = useState(!document.hidden);
  useEffect(() => {
    const note = () => setSeen(!document.hidden);
    document.addEventListener("visibilitychange", note);
    return () => document.removeEventListener("visibilitychange", note);
  }, []);
  return isSeen;
}
