import { Check, Copy, Download, WrapText } from "lucide-react";
import { memo, type ReactNode, useEffect, useRef, useState } from "react";
import { copyText } from "../lib/copy";
import { formatCount } from "../lib/format";
import { saveFile } from "../lib/save";
import { savedStore } from "../lib/saved";
import { useStore } from "../lib/store";
import { Button, IconButton } from "./Button";
import styles from "./CodeBlock.module.css";
import { loadHighlighter } from "./highlight";

const AGAIN_MS = 200;
const MOST_CHARACTERS = 60_000;
/** Longer code is folded to this many lines until all of it is asked for. */
const SHOWN_LINES = 40;

/** Whether long lines are broken; one choice for all code. */
const wraps = savedStore("code.wrap", false, (value): value is boolean => typeof value === "boolean");

interface Props {
  code: string;
  language: string;
  /** What is shown instead of the code, which is copied and downloaded whole. */
  shown?: string;
  /** While it grows, it is coloured now and then; what is new stands behind in plain text until then. */
  growing?: boolean;
  /** Buttons of its own, before those that all code has. */
  tools?: ReactNode;
  /** Shown in place of the code. */
  picture?: ReactNode;
  /** A line below the code. */
  note?: string | undefined;
}

/** A block of code with its language; a bar that stays in sight copies it, breaks its lines and saves it as a file. */
export const CodeBlock = memo(function CodeBlock(props: Props) {
  const { code, language, shown: text = code, growing = false, tools, picture, note } = props;
  const [copied, setCopied] = useState(false);
  const [isOpen, setOpen] = useState(growing);
  const wrapped = useStore(wraps);
  const lines = text.split("\n");
  const isLong = lines.length > SHOWN_LINES + 5;
  const shown = isLong && !isOpen ? lines.slice(0, SHOWN_LINES).join("\n") : text;
  const coloured = useColours(shown, language, growing);
  const copy = async () => {
    setCopied(await copyText(code));
    setTimeout(() => setCopied(false), 1_500);
  };
  return (
    <figure className={styles.block} dir="ltr">
      <figcaption className={styles.head}>
        <span>{language || "text"}</span>
        <span className={styles.buttons}>
          {tools}
          <IconButton small label="Wrap lines" aria-pressed={wrapped} onClick={() => wraps.set(!wrapped)}>
            <WrapText />
          </IconButton>
          <IconButton
            small
            label="Download code"
            onClick={() => saveFile(`code.${endingOf(language)}`, code, "text/plain")}
          >
            <Download />
          </IconButton>
          <Button kind="quiet" small onClick={copy} aria-label={copied ? "Copied" : "Copy code"}>
            {copied ? <Check /> : <Copy />}
            {copied ? "Copied" : "Copy"}
          </Button>
        </span>
      </figcaption>
      {picture ? (
        <div className={styles.picture}>{picture}</div>
      ) : (
        // biome-ignore lint/a11y/noNoninteractiveTabindex: wide code is scrolled with the keyboard.
        <pre tabIndex={0} className={wrapped ? styles.wrapped : undefined}>
          <code>
            {coloured.nodes}
            {shown.slice(coloured.length)}
          </code>
        </pre>
      )}
      {note && <p className={styles.note}>{note}</p>}
      {isLong && !picture && (
        <Button kind="quiet" className={styles.more ?? ""} aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>
          {isOpen ? "Show fewer lines" : `Show all ${formatCount(lines.length)} lines`}
        </Button>
      )}
    </figure>
  );
});

const ENDINGS: Readonly<Record<string, string>> = {
  python: "py",
  javascript: "js",
  typescript: "ts",
  bash: "sh",
  shell: "sh",
  console: "sh",
  rust: "rs",
  ruby: "rb",
  kotlin: "kt",
  csharp: "cs",
  markdown: "md",
  mermaid: "mmd",
  yaml: "yml",
  text: "txt",
};

/** How the name of a file of this language ends. */
function endingOf(language: string): string {
  const name = language.toLowerCase();
  return ENDINGS[name] ?? (/^[a-z]{1,4}$/.test(name) ? name : "txt");
}

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
