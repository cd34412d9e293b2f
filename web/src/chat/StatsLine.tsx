import { formatCount, formatRate, formatSeconds } from "../lib/format";
import styles from "./StatsLine.module.css";
import type { AssistantMessage } from "./types";

/** What an answer cost: time to the first token, speed, lengths, what came from the cache, and its seed. */
export function StatsLine({ message, growing }: { message: AssistantMessage; growing: boolean }) {
  const { stats, model, seed } = message;
  if (!stats) return null;
  return (
    <dl className={styles.stats} aria-label="Figures of this answer">
      {!growing && model && <Item label="Model" value={model} />}
      {stats.firstTokenMs !== null && <Item label="First token" value={formatSeconds(stats.firstTokenMs / 1000)} />}
      {stats.tokensPerSecond !== null && <Item label="Speed" value={formatRate(stats.tokensPerSecond)} />}
      <Item label="Answer" value={`${formatCount(stats.answerTokens)} tokens`} />
      <Item
        label="Cached"
        value={`${formatCount(stats.cachedTokens)} of ${formatCount(stats.promptTokens)} prompt tokens`}
      />
      {!growing && seed !== undefined && <Item label="Seed" value={String(seed)} />}
    </dl>
  );
}

function Item({ label, value }: { label: string; value: string }) {
  return (
    <div>
      <dt>{label}</dt>
      <dd>{value}</dd>
    </div>
  );
}
