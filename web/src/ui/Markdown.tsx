import type { Root } from "hast";
import { memo, type RefObject, useEffect, useLayoutEffect, useMemo, useRef, useState } from "react";
import ReactMarkdown, { type Options } from "react-markdown";
import remarkGfm from "remark-gfm";
import { CodeBlock } from "./CodeBlock";
import { markCitations } from "./citations";
import { Diagram } from "./Diagram";
import styles from "./Markdown.module.css";
import { type Block, closeOpen, mayHaveMath, splitBlocks, unifyMath } from "./markdownBlocks";
import { COMPONENTS, readAddress } from "./markdownParts";

type Plugins = Pick<Options, "remarkPlugins" | "rehypePlugins">;

const PLAIN: Plugins = { remarkPlugins: [remarkGfm], rehypePlugins: [followText, markCitations] };
const MOST_CHARACTERS = 60_000;
const LARGE = 1_500;
const MOST_MS = 300;
const MOST_LEVELS = 5;

/** Has each paragraph, list and table run from the side that its own text begins at: Arabic and Hebrew from the right. */
function followText() {
  return (root: Root) => {
    for (const node of root.children)
      if (node.type === "element" && node.tagName !== "pre") node.properties.dir = "auto";
  };
}

let maths: Plugins | null = null;

/** The plugins that draw maths; their code is loaded when the first formula is shown. */
async function loadMaths(): Promise<Plugins> {
  const [{ default: remarkMath }, { default: rehypeKatex }] = await Promise.all([
    import("remark-math"),
    import("rehype-katex"),
  ]);
  maths = {
    remarkPlugins: [remarkGfm, [remarkMath, { singleDollarTextMath: false }]],
    rehypePlugins: [
      followText,
      markCitations,
      [rehypeKatex, { output: "mathml", throwOnError: false, strict: false, maxSize: 20, maxExpand: 500 }],
    ],
  };
  return maths;
}

/**
 * A text in Markdown. HTML in it is shown as text, addresses that are no web pages are dropped, and images are shown as
 * links, since a picture from elsewhere tells its server who reads. While `growing`, only the last block is read again.
 */
export const Markdown = memo(function Markdown({ text, growing = false, level = 0 }: MarkdownProps) {
  const blocks = useMemo(() => splitBlocks(text), [text]);
  return (
    <div className={styles.markdown}>
      {blocks.map((block, index) => {
        const isOpen = growing && index === blocks.length - 1;
        // biome-ignore lint/suspicious/noArrayIndexKey: blocks never change places.
        return <BlockView key={index} {...flatten(block)} growing={isOpen} level={level} />;
      })}
    </div>
  );
});

interface MarkdownProps {
  text: string;
  growing?: boolean;
  level?: number;
}

interface BlockProps {
  kind: Block["kind"];
  text: string;
  /** Of code; the summary of details. */
  language: string;
  closed: boolean;
  growing: boolean;
  /** How many details it lies in. */
  level: number;
}

/** A block as plain values, so that one that has not changed is not drawn again. */
function flatten(block: Block): Omit<BlockProps, "growing" | "level"> {
  if (block.kind === "code") return { kind: "code", text: block.code, language: block.language, closed: block.closed };
  if (block.kind === "details")
    return { kind: "details", text: block.text, language: block.summary, closed: block.closed };
  return { kind: block.kind, text: block.text, language: "", closed: block.kind === "text" || block.closed };
}

const BlockView = memo(function BlockView({ kind, text, language, closed, growing, level }: BlockProps) {
  if (kind === "code" && language.toLowerCase() === "mermaid" && (closed || !growing)) return <Diagram code={text} />;
  if (kind === "code") return <CodeBlock code={text} language={language} growing={growing && !closed} />;
  if (kind === "details")
    return (
      <details className={styles.details} open={growing && !closed}>
        <summary dir="auto">{language}</summary>
        {level < MOST_LEVELS ? (
          <Markdown text={text} growing={growing && !closed} level={level + 1} />
        ) : (
          <pre className={styles.raw}>{text}</pre>
        )}
      </details>
    );
  if (text.length > MOST_CHARACTERS || (kind === "math" && !closed)) return <pre className={styles.raw}>{text}</pre>;
  return <TextBlock text={growing && kind === "text" ? closeOpen(text) : text} growing={growing} />;
});

function TextBlock({ text, growing }: { text: string; growing: boolean }) {
  const cost = useRef(0);
  return <DrawnText text={useUnhurried(text, growing, cost)} cost={cost} />;
}

/** A large block while it grows, not drawn again before three times as long has passed as drawing it took. */
function useUnhurried(text: string, growing: boolean, cost: RefObject<number>): string {
  const [shown, setShown] = useState(text);
  const last = useRef(0);
  const waits = growing && text.length > LARGE;
  useEffect(() => {
    if (!waits) return;
    const due = last.current + Math.min(MOST_MS, 3 * cost.current);
    const timer = setTimeout(
      () => {
        last.current = performance.now();
        setShown(text);
      },
      Math.max(0, due - performance.now()),
    );
    return () => clearTimeout(timer);
  }, [text, waits, cost]);
  return waits && text.startsWith(shown.slice(0, LARGE)) ? shown : text;
}

const DrawnText = memo(function DrawnText({ text, cost }: { text: string; cost: RefObject<number> }) {
  const started = performance.now();
  const plugins = usePlugins(mayHaveMath(text));
  useLayoutEffect(() => {
    cost.current = performance.now() - started;
  });
  return (
    <ReactMarkdown {...plugins} components={COMPONENTS} urlTransform={readAddress}>
      {plugins === PLAIN ? text : unifyMath(text)}
    </ReactMarkdown>
  );
});

function usePlugins(wantsMaths: boolean): Plugins {
  const [, setLoaded] = useState(maths !== null);
  useEffect(() => {
    if (wantsMaths && maths === null) void loadMaths().then(() => setLoaded(true));
  }, [wantsMaths]);
  return wantsMaths && maths !== null ? maths : PLAIN;
}
