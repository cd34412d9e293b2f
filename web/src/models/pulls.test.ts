import { afterEach, expect, it, vi } from "vitest";
import { dismissPull, PullTally, pulls, startPull, stopPull, unfinished } from "./pulls";

afterEach(() => {
  for (const pull of pulls.get()) dismissPull(pull.model);
});

function answer(lines: object[], end: "close" | "hang" = "close"): typeof fetch {
  return vi.fn(async (_path, init) => {
    const body = new ReadableStream<Uint8Array>({
      start(control) {
        for (const line of lines) control.enqueue(new TextEncoder().encode(`${JSON.stringify(line)}\n`));
        if (end === "close") control.close();
        init?.signal?.addEventListener("abort", () => control.error(new DOMException("stopped", "AbortError")));
      },
    });
    return new Response(body);
  });
}

it("sums bytes over files and says the speed of the last seconds", () => {
  const tally = new PullTally();
  tally.add({ status: "pulling manifest" }, 0);
  expect(tally.read()).toEqual({ doneBytes: 0, totalBytes: 0, bytesPerSecond: 0 });
  tally.add({ status: "pulling", digest: "a", total: 100, completed: 100 }, 0);
  tally.add({ status: "pulling", digest: "b", total: 900, completed: 0 }, 1000);
  tally.add({ status: "pulling", digest: "b", total: 900, completed: 400 }, 2000);
  expect(tally.read()).toEqual({ doneBytes: 500, totalBytes: 1000, bytesPerSecond: 200 });
  tally.add({ status: "pulling", digest: "b", total: 900, completed: 400 }, 60_000);
  tally.add({ status: "pulling", digest: "b", total: 900, completed: 400 }, 61_000);
  expect(tally.read().bytesPerSecond).toBe(0);
});

it("ends done, and is no longer unfinished", async () => {
  vi.stubGlobal("fetch", answer([{ status: "pulling", digest: "a", total: 5, completed: 5 }, { status: "success" }]));
  const done = vi.fn();
  await startPull("hf.co/a/b", done);
  expect(pulls.get()).toMatchObject([{ model: "hf.co/a/b", state: "done", doneBytes: 5 }]);
  expect(done).toHaveBeenCalledOnce();
  expect(unfinished.get()).toEqual([]);
});

it("keeps a stopped pull to be resumed", async () => {
  vi.stubGlobal("fetch", answer([{ status: "pulling", digest: "a", total: 9, completed: 4 }], "hang"));
  const ended = startPull("hf.co/a/b", () => undefined);
  await vi.waitFor(() => expect(pulls.get()[0]?.doneBytes).toBe(4));
  stopPull("hf.co/a/b");
  await ended;
  expect(pulls.get()[0]?.state).toBe("stopped");
  expect(unfinished.get()).toEqual(["hf.co/a/b"]);
});

it("says why a pull failed", async () => {
  vi.stubGlobal("fetch", answer([{ error: "hf.co/a/b: there is no such repository" }]));
  await startPull("hf.co/a/b", () => undefined);
  expect(pulls.get()[0]).toMatchObject({ state: "failed", text: "hf.co/a/b: there is no such repository" });
});
