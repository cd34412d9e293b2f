import { type ReactNode, useEffect, useRef, useState } from "react";
import { formatCount, formatSeconds } from "../lib/format";
import { Markdown } from "../ui/Markdown";
import { type Asked, ask, findDifference, NOTHING } from "./ask";
import styles from "./CompareView.module.css";
import { OptionsForm } from "./OptionsForm";
import { DEFAULTS, writeBody } from "./options";
import { Prompt } from "./Prompt";

const TIMES = 16;
const SHOWN_CHARACTERS = 400;

/** Asks once alone and then 16 times at once, all with one seed, and shows whether the answers are the same text. */
export function SixteenTimes() {
  const [options, setOptions] = useState(DEFAULTS);
  const [alone, setAlone] = useState<Asked | null>(null);
  const [together, setTogether] = useState<readonly Asked[]>([]);
  const [isRunning, setRunning] = useState(false);
  const stop = useRef<AbortController | null>(null);
  useEffect(() => () => stop.current?.abort(), []);
  const run = async (prompt: string) => {
    const control = new AbortController();
    stop.current = control;
    setRunning(true);
    setTogether([]);
    // Without a seed each answer would draw its own.
    const body = writeBody(prompt, { ...options, seed: options.seed ?? 1 });
    const first = await ask(body, control.signal, setAlone);
    if (first.state === "done") {
      const growing: Asked[] = Array.from({ length: TIMES }, () => NOTHING);
      setTogether([...growing]);
      const draw = gatherFrames(() => setTogether([...growing]));
      await Promise.all(
        growing.map((_, index) =>
          ask(body, control.signal, (asked) => {
            growing[index] = asked;
            draw();
          }),
        ),
      );
      setTogether([...growing]);
    }
    setRunning(false);
  };
  return (
    <>
      <Prompt
        label="A question, asked alone and then 16 times at once"
        verb="Ask it 16 times"
        isRunning={isRunning}
        onAsk={(prompt) => void run(prompt)}
        onStop={() => stop.current?.abort()}
        note={summarise(alone, together, isRunning)}
      >
        <OptionsForm options={options} onChange={setOptions} />
      </Prompt>
      <p className={styles.note}>
        This engine computes each answer to the same bits, whatever else runs beside it. So with one seed all 16 answers
        are the text of the first, character for character.
      </p>
      {alone && <Cell title="Alone" asked={alone} verdict={alone.state === "done" ? "the one to match" : ""} />}
      {alone && together.length > 0 && (
        <div className={styles.cells}>
          {together.map((asked, index) => (
            // biome-ignore lint/suspicious/noArrayIndexKey: the answers have no other name than their number.
            <Cell key={index} title={`${index + 1}`} asked={asked} {...judge(asked, alone)} />
          ))}
        </div>
      )}
    </>
  );
}

interface Verdict {
  verdict: string;
  kind?: "equal" | "differs";
}

function Cell({ title, asked, verdict, kind }: { title: string; asked: Asked } & Verdict) {
  const text = asked.text.length > SHOWN_CHARACTERS ? `…${asked.text.slice(-SHOWN_CHARACTERS)}` : asked.text;
  return (
    <article className={`${styles.cell} ${kind ? styles[kind] : ""}`} aria-label={`Answer ${title}`}>
      <h2>
        <span>
          {title} · {formatCount(asked.tokens)} tokens
        </span>
        <span>{verdict}</span>
      </h2>
      {asked.error === null ? <Markdown text={text} growing={asked.state === "growing"} /> : <p>{asked.error}</p>}
    </article>
  );
}

/** Whether an answer is the one asked alone, as far as it has come. */
function judge(asked: Asked, alone: Asked): Verdict {
  if (asked.state === "waiting") return { verdict: "waits" };
  if (asked.state === "failed") return { verdict: "failed", kind: "differs" };
  if (asked.state !== "done") {
    const isSame = alone.text.startsWith(asked.text);
    return isSame ? { verdict: "same so far" } : { verdict: "differs", kind: "differs" };
  }
  const at = findDifference(asked.text, alone.text);
  return at === null ? { verdict: "equal", kind: "equal" } : { verdict: `differs at character ${at}`, kind: "differs" };
}

function summarise(alone: Asked | null, together: readonly Asked[], isRunning: boolean): ReactNode {
  if (alone === null) return "";
  if (alone.state === "failed") return alone.error ?? "It failed.";
  if (alone.state === "stopped") return "Stopped.";
  if (together.length === 0) return isRunning ? "Asked alone first …" : "";
  const done = together.filter((asked) => asked.state === "done");
  const equal = done.filter((asked) => asked.text === alone.text).length;
  if (isRunning) return `${equal} of ${TIMES} are there, and equal`;
  if (done.length < TIMES) return `Stopped: ${equal} of ${done.length} answers are equal.`;
  const seconds = Math.max(...done.map((asked) => asked.wholeS));
  const verdict = equal === TIMES ? `All ${TIMES} answers are equal` : `${TIMES - equal} of ${TIMES} answers differ`;
  return (
    <>
      <strong data-verdict={equal === TIMES ? "equal" : "differs"}>{verdict}.</strong> Alone it took{" "}
      {formatSeconds(alone.wholeS)}, all {TIMES} together {formatSeconds(seconds)}.
    </>
  );
}

/** `draw`, at most once in a frame. */
function gatherFrames(draw: () => void): () => void {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      draw();
    });
  };
}
