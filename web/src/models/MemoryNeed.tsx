import { useDeferredValue, useState } from "react";
import { describeError } from "../api/client";
import { useMemoryEstimate } from "../api/manage";
import { formatBytes, formatCount } from "../lib/format";
import { Notice } from "../ui/Notice";
import styles from "./MemoryNeed.module.css";

/** What a model takes of the memory, drawn before it is loaded: weights, what is in use, what is reserved, and why it does not fit. */
export function MemoryNeed({ name, contextTokens }: { name: string; contextTokens: number }) {
  const [tokens, setTokens] = useState<number | null>(null);
  const { data, error } = useMemoryEstimate(name, useDeferredValue(tokens));
  if (error) return <Notice kind="warning">Its memory could not be estimated. {describeError(error)}</Notice>;
  if (!data) return null;
  const cached = data.is_loaded ? data.cache_in_use_bytes : data.conversation_bytes;
  const needed = data.weights_bytes + cached;
  const reserved = Math.max(0, data.cache_max_bytes - cached);
  const whole = Math.max(needed, data.free_bytes, 1);
  const parts = [
    ["Weights", data.weights_bytes, styles.weights],
    [data.is_loaded ? "In use" : "One conversation", cached, styles.cache],
    ["Reserved", Math.min(reserved, Math.max(0, whole - needed)), styles.reserved],
  ] as const;
  return (
    <section className={styles.need} aria-label="Memory">
      <h2>
        Memory{" "}
        <span>
          {formatBytes(needed)} {data.is_loaded ? "in use" : "needed"}
        </span>{" "}
        <span>{formatBytes(data.free_bytes)} free for models</span>
      </h2>
      <div className={styles.bar} aria-hidden="true">
        {parts.map(([label, bytes, part]) => (
          <span key={label} className={part} style={{ width: `${(100 * bytes) / whole}%` }} />
        ))}
      </div>
      <ul className={styles.legend}>
        {parts.map(([label, bytes, part]) => (
          <li key={label}>
            <span className={`${styles.swatch} ${part}`} aria-hidden="true" /> {label}{" "}
            {label === "Reserved" ? `up to ${formatBytes(data.cache_max_bytes)} for the cache` : formatBytes(bytes)}
          </li>
        ))}
      </ul>
      <ContextSlider most={contextTokens} tokens={tokens ?? data.conversation_tokens} onChange={setTokens} />
      <p className={styles.note}>
        A conversation of {formatCount(data.conversation_tokens)} tokens fills {formatBytes(data.conversation_bytes)} of
        the cache. What is reserved takes memory only as it is used.
      </p>
      {data.unloads.length > 0 && (
        <Notice kind="plain">Loading it unloads {data.unloads.join(", ")} to make room.</Notice>
      )}
      {!data.fits && <Notice kind="error">{data.reason ?? "It does not fit."}</Notice>}
    </section>
  );
}

const LEAST = 512;

/** Chooses the length of a conversation: powers of two, and the whole context. */
function ContextSlider({ most, tokens, onChange }: { most: number; tokens: number; onChange: (t: number) => void }) {
  const lengths: number[] = [];
  for (let length = LEAST; length < most; length *= 2) lengths.push(length);
  lengths.push(most);
  const at = lengths.findIndex((length) => length >= tokens);
  return (
    <label className={styles.slider}>
      <span>Length of a conversation</span>
      <input
        type="range"
        min={0}
        max={lengths.length - 1}
        step={1}
        value={at < 0 ? lengths.length - 1 : at}
        aria-valuetext={`${formatCount(tokens)} tokens`}
        onChange={(event) => onChange(lengths[Number(event.target.value)] ?? most)}
      />
      <output>{formatCount(tokens)} tokens</output>
    </label>
  );
}
