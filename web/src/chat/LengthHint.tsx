import { useQuery } from "@tanstack/react-query";
import { useDeferredValue, useEffect, useState } from "react";
import { countTokens } from "../api/chat";
import { formatCount } from "../lib/format";
import { explain } from "./explain";
import styles from "./LengthHint.module.css";
import type { Attached, Conversation, Message, UserMessage } from "./types";
import { useContextLength } from "./useContextLength";
import { writeRequest } from "./wire";

const SHORT = 1_000;
const WAIT_MS = 500;

interface Props {
  conversation: Conversation;
  path: readonly Message[];
  text: string;
  attached: Attached;
  /** Whether the model sees the pictures, so that they can be counted. */
  sees: boolean;
}

/** How many tokens a long message or one with pictures makes with what came before, and whether the context takes them. */
export function LengthHint({ conversation, path, text, attached, sees }: Props) {
  const { files, pictures } = attached;
  const rested = useRested(useDeferredValue(text));
  const length = rested.length + files.reduce((sum, file) => sum + file.text.length, 0);
  const isSeen = pictures.length > 0 || files.some(({ url }) => url);
  const isCounted = isSeen ? sees : length > SHORT;
  const last = path.findLast((message) => message.role === "assistant");
  const context = useContextLength(conversation.settings.model || (last?.model ?? ""));
  const count = useQuery({
    queryKey: [
      "tokens",
      conversation.id,
      conversation.settings,
      path.at(-1)?.id,
      rested,
      files.map(({ name, text, url }) => [name, text, url?.length]),
      pictures.map(({ url }) => url.length),
    ],
    queryFn: ({ signal }) => {
      const next: UserMessage = { ...NEXT, content: rested, files, pictures };
      return countTokens(writeRequest([...path, next], conversation.settings, 0, false), signal);
    },
    enabled: isCounted,
    retry: false,
    staleTime: Number.POSITIVE_INFINITY,
    gcTime: 10_000,
  });
  if (!isCounted) return null;
  if (count.error)
    return (
      <p className={styles.over} role="alert">
        {explain(count.error)}
      </p>
    );
  if (count.data === undefined) return isSeen ? <p className={styles.hint}>Counting tokens…</p> : null;
  const isTooLong = context !== null && count.data >= context;
  return (
    <p className={isTooLong ? styles.over : styles.hint} role={isTooLong ? "alert" : "status"}>
      {formatCount(count.data)} tokens with what came before
      {isTooLong && `: the context has ${formatCount(context)}. Shorten the message or start a new chat.`}
    </p>
  );
}

const NEXT: UserMessage = { id: "next", conversation: "", parent: null, created: 0, content: "", role: "user" };

/** A text once it has not changed for a moment. */
function useRested(text: string): string {
  const [rested, setRested] = useState(text);
  useEffect(() => {
    const timer = setTimeout(() => setRested(text), WAIT_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return text === "" ? "" : rested;
}
