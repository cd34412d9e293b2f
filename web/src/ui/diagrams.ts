import mermaidUrl from "@mermaid-js/tiny/dist/mermaid.tiny.js?url";
import { describeError } from "../api/client";
import { openSandbox, type Sandbox } from "../lib/sandbox";

const LIMIT_MS = 15_000;
const MOST_CHARACTERS = 20_000;
const MOST_KEPT = 60;

/** A drawn diagram: an SVG, shown as a picture, in which nothing runs and nothing can be clicked. Or why there is none. */
export type Drawing = { svg: string; width: number; height: number } | { error: string; again?: true };

let sandbox: Promise<Sandbox> | null = null;
let queue: Promise<unknown> = Promise.resolve();
const kept = new Map<string, Drawing>();

/** The diagram of a text in Mermaid in a theme, if it was drawn before; `again` where another try may succeed. */
export function findDrawing(text: string, theme: string): Drawing | null {
  return kept.get(`${theme} ${text}`) ?? null;
}

/** Draw the diagram that a text in Mermaid describes, in the colours that the page has now. */
export function drawDiagram(text: string, theme: string): Promise<Drawing> {
  const colours = readColours();
  const drawing = queue.then(() => draw(text, colours));
  queue = drawing;
  return drawing.then((drawn) => {
    kept.set(`${theme} ${text}`, drawn);
    for (const old of [...kept.keys()].slice(0, -MOST_KEPT)) kept.delete(old);
    return drawn;
  });
}

async function draw(text: string, colours: object): Promise<Drawing> {
  if (text.length > MOST_CHARACTERS) return { error: `It is longer than ${MOST_CHARACTERS} characters.` };
  let opened: Sandbox | null = null;
  try {
    sandbox ??= open();
    opened = await sandbox;
    return (await opened.ask({ text, colours }, LIMIT_MS)) as Drawing;
  } catch (error) {
    opened?.end();
    sandbox = null;
    return { error: describeError(error), again: true };
  }
}

async function open(): Promise<Sandbox> {
  const response = await fetch(mermaidUrl);
  if (!response.ok) throw new Error("The part of the page that draws diagrams did not come.");
  return openSandbox([await response.text(), `(${answerInSandbox})()`]);
}

/** The colours that diagrams take from the page's theme. */
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name: string) => style.getPropertyValue(`--${name}`).trim();
  return {
    darkMode: document.documentElement.dataset.theme === "dark",
    background: read("sunken"),
    primaryColor: read("accent-soft"),
    primaryTextColor: read("text"),
    primaryBorderColor: read("accent"),
    secondaryColor: read("warning-soft"),
    tertiaryColor: read("raised"),
    lineColor: read("text-soft"),
    textColor: read("text"),
    noteBkgColor: read("warning-soft"),
    noteTextColor: read("text"),
    errorBkgColor: read("danger-soft"),
    errorTextColor: read("danger"),
    fontFamily: "system-ui, sans-serif",
  };
}

interface Mermaid {
  initialize(config: object): void;
  render(id: string, text: string): Promise<{ svg: string }>;
}

declare const mermaid: Mermaid;
declare const port: MessagePort;

/** Runs in the sandbox, behind Mermaid, and so uses nothing of this file. */
function answerInSandbox(): void {
  let number = 0;
  port.onmessage = async ({ data: { text, colours } }) => {
    try {
      mermaid.initialize({
        startOnLoad: false,
        securityLevel: "strict",
        suppressErrorRendering: true,
        htmlLabels: false,
        flowchart: { htmlLabels: false },
        class: { htmlLabels: false },
        maxTextSize: text.length + 1,
        theme: "base",
        fontFamily: colours.fontFamily,
        themeVariables: colours,
      });
      number += 1;
      const { svg } = await mermaid.render(`d${number}`, text);
      document.body.innerHTML = svg;
      const drawn = document.body.querySelector("svg");
      if (!drawn) throw new Error("There is no diagram in it.");
      const { width, height } = drawn.viewBox.baseVal ?? { width: 0, height: 0 };
      drawn.setAttribute("width", `${width}`);
      drawn.setAttribute("height", `${height}`);
      drawn.style.maxWidth = "";
      port.postMessage({ svg: new XMLSerializer().serializeToString(drawn), width, height });
    } catch (error) {
      const lines = String(error instanceof Error ? error.message : error).split("\n");
      port.postMessage({ error: (lines[0] ?? "").slice(0, 300).replace(/:$/, ".") });
    }
    document.body.replaceChildren();
  };
}
