import { type ComponentType, createElement, useCallback, useEffect, useRef, useState } from "react";
import { Button } from "../ui/Button";
import { Notice } from "../ui/Notice";
import { Skeleton } from "../ui/Skeleton";
import { saveKept } from "./kept";

/** Whether the page may be loaded anew by itself now: not while an answer grows in it. */
export const busy: { isBusy: () => boolean } = { isBusy: () => false };

const RELOADED = "mlxr.reloaded";
const FIRST_PAUSE_MS = 1_000;
const LONGEST_PAUSE_MS = 15_000;

/**
 * A component whose code is a file of its own, fetched when it is first drawn.
 *
 * Where the file does not come, its place says so and tries again by itself. When the server has another version of the
 * page by now, which has no such file, or answers again and the browser still has no file, the page is loaded anew once;
 * what the person typed is kept.
 */
export function lazily<P extends object>(load: () => Promise<{ default: ComponentType<P> }>): ComponentType<P> {
  let found: ComponentType<P> | null = null;
  return function Later(props: P) {
    const [state, setState] = useState<"fetching" | "there" | "failed">(found ? "there" : "fetching");
    const hasFailed = useRef(false); // while the server did not answer
    const fetchIt = useCallback(async () => {
      try {
        found ??= (await load()).default;
        setState("there");
      } catch {
        const index = await readIndex();
        // A server that answers has the file, or another version of it; some browsers remember that it did not come.
        if (index !== null && (isOther(index) || hasFailed.current)) reloadOnce();
        hasFailed.current ||= index === null;
        setState("failed");
      }
      return found !== null;
    }, []);
    useEffect(() => {
      let timer = 0;
      let ended = false;
      const go = async (pauseMs: number) => {
        if (ended || (await fetchIt()) || ended) return;
        timer = window.setTimeout(() => void go(Math.min(2 * pauseMs, LONGEST_PAUSE_MS)), pauseMs);
      };
      void go(FIRST_PAUSE_MS);
      return () => {
        ended = true;
        window.clearTimeout(timer);
      };
    }, [fetchIt]);
    if (found && state === "there") return createElement(found, props);
    return state === "fetching" ? <Skeleton /> : <Missing onRetry={fetchIt} />;
  };
}

/** Says that a view is missing. A browser may remember that a file did not come; then only loading the page helps. */
function Missing({ onRetry }: { onRetry: () => Promise<boolean> }) {
  const retry = async () => {
    if (!(await onRetry()) && (await readIndex()) !== null) reload();
  };
  return (
    <Notice kind="error" actions={<Button onClick={() => void retry()}>Try again</Button>}>
      This view could not be loaded. It is tried again by itself, and comes when the server answers.
    </Notice>
  );
}

/** Load the page anew with what the person had typed. */
export function reload(): void {
  saveKept();
  window.location.reload();
}

function ownScript(): string {
  return document.querySelector('script[type="module"][src]')?.getAttribute("src") ?? "";
}

/** The page as the server has it now; null where it does not answer. */
async function readIndex(): Promise<string | null> {
  try {
    const response = await fetch("./", { headers: { accept: "text/html" }, cache: "no-store" });
    return response.ok ? await response.text() : null;
  } catch {
    return null;
  }
}

/** Whether this index is that of another version of the page. */
function isOther(index: string): boolean {
  const own = ownScript();
  return own !== "" && index.includes('id="root"') && !index.includes(own);
}

/** Reload, but never twice from the same version: then the new one is not what this tab gets. */
function reloadOnce(): void {
  if (busy.isBusy()) return;
  try {
    if (sessionStorage.getItem(RELOADED) === ownScript()) return;
    sessionStorage.setItem(RELOADED, ownScript());
  } catch {
    return;
  }
  reload();
}
