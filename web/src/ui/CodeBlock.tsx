import { Check, Copy } from "lucide-react";
import { memo, type ReactNode, useEffect, useRef, useState } from "react";
import { copyText } from "../lib/copy";
import { Button } from "./Button";
import styles from "./CodeBlock.module.css";
import { loadHighlighter } from "./highlight";

const AGAIN_MS = 200;
const MOST_CHARACTERS = 60_000;

interface Props {
  code: string;
  language: string;
  /** While it grows, it is coloured now and then; what is new stands behind in plain text until then. */
  growing?: boolean;
}

/** A block of code with its language and a button that copies it. */
export const CodeBlock = memo(function CodeBlock({ code, language, growing = false }: Props) {
  const [copied, setCopied] = useState(false);
  const coloured = useColours(code, language, growing);
  const copy = async () => {
    setCopied(await copyText(code));
    setTimeout(() => setCopied(false), 1_500);
  };
  return (
    <figure className={styles.block}>
      <figcaption className={styles.head}>
        <span>{language || "text"}</span>
        <Button kind="quiet" small onClick={copy} aria-label={copied ? "Copied" : "Copy code"}>
          {copied ? <Check /> : <Copy />}
          {copied ? "Copied" : "Copy"}
        </Button>
      </figcaption>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: wide code is scrolled with the keyboard. */}
      <pre tabIndex={0}>
        <code>
          {coloured.nodes}
          {code.slice(coloured.length)}
        </code>
      </pre>
    </figure>
  );
});

/** The beginning of the code in colours, as far as it is coloured. */
function useColours(code: string, language: string, growing: boolean): { nodes: ReactNode; length: number } {
  const [coloured, setColoured] = useState<{ code: string; nodes: ReactNode }>({ code: "", nodes: null });
  const last = useRef(0);
  useEffect(() => {
    if (!language || code.length > MOST_CHARACTERS) return;
    let ended = false;
    const wait = growing ? Math.max(0, last.current + AGAIN_MS - performance.now()) : 0;
    const timer = setTimeout(async () => {
      last.current = performance.now();
      const highlight = await loadHighlighter();
      const nodes = highlight(code, language.toLowerCase());
      if (!ended && nodes) setColoured({ code, nodes });
    }, wait);
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, [code, language, growing]);
  return code.startsWith(coloured.code)
    ? { nodes: coloured.nodes, length: coloured.code.length }
    : { nodes: null, length: 0 };
}
