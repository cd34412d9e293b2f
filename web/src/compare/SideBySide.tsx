import { Plus, ThumbsUp, X } from "lucide-react";
import { useEffect, useMemo, useRef, useState } from "react";
import { useServerInfo } from "../api/manage";
import { countChanges, findParts } from "../lib/diff";
import { formatCount, formatRate, formatSeconds } from "../lib/format";
import { Button, IconButton } from "../ui/Button";
import { CheckField } from "../ui/Field";
import { Markdown } from "../ui/Markdown";
import { Notice } from "../ui/Notice";
import { type Asked, ask } from "./ask";
import styles from "./CompareView.module.css";
import { OptionsForm } from "./OptionsForm";
import { DEFAULTS, type Options, writeBody } from "./options";
import { Prompt } from "./Prompt";
import { addVote, nameOptions } from "./tally";
import { Votes } from "./Votes";

const NAMES = ["A", "B", "C", "D"] as const;

/** One question to two, three or four models or settings; the person says which answer is best. */
export function SideBySide() {
  const [options, setOptions] = useState<readonly Options[]>([{ ...DEFAULTS, temperature: 0 }, DEFAULTS]);
  const [answers, setAnswers] = useState<readonly (Asked | null)[]>([null, null]);
  const [voted, setVoted] = useState(false);
  const [marks, setMarks] = useState(false);
  const usual = useServerInfo().data?.default_model ?? "";
  const stop = useRef<AbortController | null>(null);
  const [isRunning, setRunning] = useState(false);
  useEffect(() => () => stop.current?.abort(), []);
  const run = async (prompt: string) => {
    const control = new AbortController();
    stop.current = control;
    setRunning(true);
    setVoted(false);
    setAnswers(options.map(() => null));
    await Promise.all(
      options.map((one, side) =>
        ask(writeBody(prompt, one), control.signal, (asked) => setAnswers((all) => put(all, side, asked))),
      ),
    );
    setRunning(false);
  };
  const add = () => {
    setOptions([...options, { ...DEFAULTS, ...options.at(-1) }]);
    setAnswers([...answers, null]);
  };
  const remove = (side: number) => {
    setOptions(options.filter((_, at) => at !== side));
    setAnswers(answers.filter((_, at) => at !== side));
  };
  const vote = (best: number | null) => {
    addVote(
      options.map((one) => nameOptions(one, usual)),
      best,
    );
    setVoted(true);
  };
  const base = answers[0]?.text ?? "";
  const canMark = base !== "" && answers.slice(1).some((asked) => asked?.text);
  const canVote = !isRunning && !voted && answers.every((asked) => asked?.state === "done");
  return (
    <>
      <Prompt
        label="One question for all"
        verb="Ask all"
        isRunning={isRunning}
        onAsk={(prompt) => void run(prompt)}
        onStop={() => stop.current?.abort()}
        beside={
          <Button onClick={add} disabled={isRunning || options.length >= NAMES.length}>
            <Plus aria-hidden="true" /> Add a model
          </Button>
        }
      />
      {canMark && <CheckField label="Mark what differs from A" checked={marks} onChange={setMarks} />}
      <div className={styles.sides} data-count={options.length}>
        {options.map((one, side) => (
          // biome-ignore lint/suspicious/noArrayIndexKey: a side has no other name than its place.
          <section key={side} className={styles.side} aria-label={NAMES[side]}>
            <div className={styles.sideHead}>
              <h2>{NAMES[side]}</h2>
              {options.length > 2 && (
                <IconButton small label={`Remove ${NAMES[side]}`} disabled={isRunning} onClick={() => remove(side)}>
                  <X />
                </IconButton>
              )}
            </div>
            <OptionsForm options={one} onChange={(changed) => setOptions((all) => put(all, side, changed))} />
            <Answer asked={answers[side] ?? null} from={marks && canMark && side > 0 ? base : null} />
            {canVote && (
              <Button onClick={() => vote(side)}>
                <ThumbsUp aria-hidden="true" /> {NAMES[side]} is best
              </Button>
            )}
          </section>
        ))}
      </div>
      {canVote && (
        <div>
          <Button onClick={() => vote(null)}>None is better</Button>
        </div>
      )}
      <Votes />
    </>
  );
}

/** An answer; with `from`, that text with what is gone from it and what is new in the answer. */
function Answer({ asked, from }: { asked: Asked | null; from: string | null }) {
  if (asked === null) return <p className={styles.note}>The answer appears here.</p>;
  return (
    <>
      <div className={styles.answer}>
        {from !== null && asked.text ? (
          <Differences from={from} to={asked.text} />
        ) : (
          <Markdown text={asked.text} growing={asked.state === "growing"} />
        )}
      </div>
      {asked.error !== null && <Notice kind="error">{asked.error}</Notice>}
      <p className={styles.note}>{describe(asked)}</p>
    </>
  );
}

function Differences({ from, to }: { from: string; to: string }) {
  const parts = useMemo(() => findParts(from, to), [from, to]);
  const count = countChanges(parts);
  const words = count === 1 ? "1 word differs" : `${formatCount(count)} words differ`;
  return (
    <>
      <p className={styles.note}>{from === to ? "The same text as A." : `${words} from A.`}</p>
      <p className={styles.marked} dir="auto">
        {parts.map(({ kind, text }, index) => {
          const Tag = ({ same: "span", gone: "del", new: "ins" } as const)[kind];
          // biome-ignore lint/suspicious/noArrayIndexKey: a stretch has no other name than its place.
          return <Tag key={index}>{text}</Tag>;
        })}
      </p>
    </>
  );
}

function describe(asked: Asked): string {
  const parts = [`${formatCount(asked.tokens)} tokens`];
  if (asked.firstS !== null) parts.push(`first after ${formatSeconds(asked.firstS)}`);
  if (asked.tokensPerS !== null) parts.push(formatRate(asked.tokensPerS));
  if (asked.cachedTokens > 0) parts.push(`${formatCount(asked.cachedTokens)} of the prompt from the cache`);
  if (asked.state === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

function put<T>(all: readonly T[], index: number, value: T): T[] {
  return all.map((one, at) => (at === index ? value : one));
}
