import { useVirtualizer } from "@tanstack/react-virtual";
import { ArrowDown } from "lucide-react";
import { useEffect, useRef, useState } from "react";
import { useCommand } from "../lib/commands";
import { copyText } from "../lib/copy";
import { IconButton } from "../ui/Button";
import { answer } from "./answering";
import { editing } from "./editing";
import { MessageView } from "./MessageView";
import styles from "./Thread.module.css";
import type { Tree } from "./tree";
import type { Conversation, Message } from "./types";
import { useRunOf } from "./useThread";

const NEAR = 60;

/** The messages of the branch that is shown. Only those near the screen are drawn; the end is followed as it grows. */
export function Thread({
  tree,
  path,
  conversation,
}: {
  tree: Tree;
  path: readonly Message[];
  conversation: Conversation;
}) {
  const scroll = useRef<HTMLDivElement>(null);
  const [atEnd, setAtEnd] = useState(true);
  const virtual = useVirtualizer({
    count: path.length,
    getScrollElement: () => scroll.current,
    estimateSize: (index) => estimate(path[index]),
    getItemKey: (index) => path[index]?.id ?? index,
    overscan: 4,
    paddingStart: 16,
    paddingEnd: 24,
    anchorTo: "end",
    followOnAppend: true,
    scrollEndThreshold: NEAR,
  });
  useOpenAtEnd(virtual, scroll);
  useMessageCommands(path);
  const noteScroll = () => {
    const element = scroll.current;
    if (element) setAtEnd(element.scrollHeight - element.scrollTop - element.clientHeight < NEAR);
  };
  return (
    <div className={styles.place}>
      <div
        ref={scroll}
        className={styles.scroll}
        onScroll={noteScroll}
        // biome-ignore lint/a11y/noNoninteractiveTabindex: the messages are scrolled with the keyboard.
        tabIndex={0}
        role="log"
        aria-live="off"
        aria-label="Messages"
      >
        <ol className={styles.messages} style={{ height: virtual.getTotalSize() }}>
          {virtual.getVirtualItems().map((item) => {
            const message = path[item.index];
            if (!message) return null;
            return (
              <li
                key={item.key}
                ref={virtual.measureElement}
                data-index={item.index}
                style={{ transform: `translateY(${item.start}px)` }}
              >
                <MessageView
                  message={message}
                  tree={tree}
                  showTokens={conversation.settings.showTokens}
                  next={path[item.index + 1]}
                />
              </li>
            );
          })}
        </ol>
      </div>
      {!atEnd && (
        <div className={styles.down}>
          <IconButton
            kind="plain"
            label="To the end"
            onClick={() => virtual.scrollToIndex(path.length - 1, { align: "end" })}
          >
            <ArrowDown />
          </IconButton>
        </div>
      )}
      <Announcement path={path} />
    </div>
  );
}

/** Begin at the end of the conversation, and go there when the person sends something. */
function useOpenAtEnd(
  virtual: { scrollToIndex: (index: number, options: { align: "end" }) => void; options: { count: number } },
  scroll: React.RefObject<HTMLDivElement | null>,
): void {
  const { count } = virtual.options;
  const before = useRef(0);
  useEffect(() => {
    const grewByTurn = count > before.current;
    before.current = count;
    if (!grewByTurn || scroll.current === null) return;
    virtual.scrollToIndex(count - 1, { align: "end" });
  }, [count, virtual, scroll]);
}

/** What the keyboard does with the last question and the last answer. */
function useMessageCommands(path: readonly Message[]): void {
  const answered = path.findLast((message) => message.role === "assistant");
  const asked = path.findLast((message) => message.role === "user");
  const run = useRunOf(path);
  useCommand("editLast", () => {
    if (asked && !run) editing.set(asked.id);
  });
  useCommand("regenerate", () => {
    if (answered && !run) void answer(answered.conversation, answered.parent);
  });
  useCommand("copyLast", () => {
    if (answered) void copyText(answered.content);
  });
}

/** Says to screen readers when an answer begins and when it is complete. */
function Announcement({ path }: { path: readonly Message[] }) {
  const run = useRunOf(path);
  const [wasRunning, setWasRunning] = useState(false);
  if (run && !wasRunning) setWasRunning(true);
  return (
    <p className="hidden-text" role="status">
      {run ? "The model answers." : wasRunning ? "The answer is complete." : ""}
    </p>
  );
}

function estimate(message: Message | undefined): number {
  if (!message) return 100;
  const pictures = message.role === "user" && message.pictures?.length ? 200 : 0;
  return 70 + pictures + Math.min(2_000, Math.ceil(message.content.length / 85) * 24);
}
