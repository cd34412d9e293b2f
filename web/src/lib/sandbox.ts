const READY_MS = 20_000;

/** Programs in a frame that sees nothing of the page and reaches nobody. */
export interface Sandbox {
  /** Send a question to the programs; one is asked at a time. Raises an Error where no answer comes in that time. */
  ask(question: object, limitMs: number): Promise<unknown>;
  /** Remove the frame, with all that runs in it. */
  end(): void;
}

/**
 * Open a frame and run `programs` in it, one after another. They find the end of a channel in `port`, and answer each
 * message that comes there by one of their own. The server's policy for the frame (`write_sandbox_policy`) gives it an
 * origin of its own and no network.
 */
export async function openSandbox(programs: readonly string[]): Promise<Sandbox> {
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", "allow-scripts");
  frame.title = "Sandbox";
  frame.tabIndex = -1;
  frame.setAttribute("aria-hidden", "true");
  frame.className = "sandbox";
  frame.src = "./sandbox";
  const { port1: port, port2 } = new MessageChannel();
  const next = (limitMs: number) =>
    new Promise<unknown>((resolve, reject) => {
      const timer = setTimeout(() => reject(new Error(`It took longer than ${limitMs / 1000} s.`)), limitMs);
      port.onmessage = ({ data }: MessageEvent<unknown>) => {
        clearTimeout(timer);
        resolve(data);
      };
    });
  const end = () => {
    port.close();
    frame.remove();
  };
  try {
    await new Promise((resolve) => {
      frame.onload = resolve;
      document.body.append(frame);
    });
    const ready = next(READY_MS);
    frame.contentWindow?.postMessage(programs, "*", [port2]);
    await ready;
  } catch {
    end();
    throw new Error("The sandbox of the page did not open.");
  }
  return {
    end,
    ask: (question, limitMs) => {
      const answer = next(limitMs);
      port.postMessage(question);
      return answer;
    },
  };
}
