import { ArrowUp, Paperclip, Square, X } from "lucide-react";
import { type KeyboardEvent, useEffect, useRef, useState } from "react";
import { runCommand, useCommand } from "../lib/commands";
import { formatBytes } from "../lib/format";
import { Button, IconButton } from "../ui/Button";
import { Notice } from "../ui/Notice";
import styles from "./Composer.module.css";
import { keepDraft, readDraft } from "./drafts";
import { LengthHint } from "./LengthHint";
import type { Attachment, Conversation, Message } from "./types";
import { useRunOf } from "./useThread";

interface Props {
  conversation: Conversation;
  path: readonly Message[];
  files: Attachment[];
  refused: readonly string[];
  onFiles: (files: Iterable<File>) => void;
  onRemoveFile: (index: number) => void;
  onSend: (text: string, files: Attachment[]) => void;
}

/** Whether the keyboard is one on a screen, whose Enter begins a line. */
function isTouch(): boolean {
  return window.matchMedia("(hover: none) and (pointer: coarse)").matches;
}

/** Where the next message is written. Enter sends it, with Shift it begins a line. */
export function Composer({ conversation, path, files, refused, onFiles, onRemoveFile, onSend }: Props) {
  const place = path.length === 0 ? "new" : conversation.id;
  const [text, setText] = useState(() => readDraft(place));
  const area = useRef<HTMLTextAreaElement>(null);
  const run = useRunOf(path);
  const canSend = !run && (text.trim() !== "" || files.length > 0);
  const latest = useRef(text);
  const type = (typed: string) => {
    latest.current = typed;
    setText(typed);
  };
  useEffect(() => {
    const timer = setTimeout(() => keepDraft(place, text), 300);
    return () => clearTimeout(timer);
  }, [place, text]);
  useEffect(() => {
    const keep = () => keepDraft(place, latest.current);
    window.addEventListener("pagehide", keep);
    return () => {
      window.removeEventListener("pagehide", keep);
      keep();
    };
  }, [place]);
  useEffect(() => {
    if (!isTouch()) area.current?.focus();
  }, []);
  useCommand("write", () => area.current?.focus());
  const send = () => {
    if (!canSend) return;
    onSend(text, files);
    type("");
    keepDraft(place, "");
    area.current?.focus();
  };
  const press = (event: KeyboardEvent) => {
    if (event.key === "Escape" && run) run.stop();
    if (event.key === "ArrowUp" && text === "" && runCommand("editLast")) event.preventDefault();
    if (event.key !== "Enter" || event.shiftKey || event.nativeEvent.isComposing || isTouch()) return;
    event.preventDefault();
    send();
  };
  return (
    <div className={styles.place}>
      <div className={styles.composer}>
        {refused.map((reason) => (
          <Notice key={reason} kind="error">
            {reason}
          </Notice>
        ))}
        <FileChips files={files} onRemove={onRemoveFile} />
        <textarea
          ref={area}
          rows={1}
          dir="auto"
          aria-label="Message"
          placeholder="Ask something"
          value={text}
          onChange={(event) => type(event.target.value)}
          onKeyDown={press}
        />
        <div className={styles.row}>
          <AttachButton onFiles={onFiles} />
          <LengthHint conversation={conversation} path={path} text={text} files={files} />
          {run ? (
            <Button kind="primary" className={styles.send ?? ""} onClick={run.stop} aria-label="Stop the answer">
              <Square fill="currentColor" />
            </Button>
          ) : (
            <Button kind="primary" className={styles.send ?? ""} onClick={send} disabled={!canSend} aria-label="Send">
              <ArrowUp />
            </Button>
          )}
        </div>
      </div>
    </div>
  );
}

function AttachButton({ onFiles }: { onFiles: (files: Iterable<File>) => void }) {
  const input = useRef<HTMLInputElement>(null);
  return (
    <>
      <input
        ref={input}
        type="file"
        multiple
        hidden
        onChange={(event) => {
          onFiles([...(event.target.files ?? [])]);
          event.target.value = "";
        }}
      />
      <IconButton label="Add text files" onClick={() => input.current?.click()}>
        <Paperclip />
      </IconButton>
    </>
  );
}

export function FileChips({ files, onRemove }: { files: readonly Attachment[]; onRemove?: (index: number) => void }) {
  if (files.length === 0) return null;
  return (
    <ul className={styles.files} aria-label="Files of the message">
      {files.map((file, index) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: two files may have the same name.
        <li key={index}>
          <span className={styles.file}>{file.name}</span>
          <span className={styles.size}>{formatBytes(new Blob([file.text]).size)}</span>
          {onRemove && (
            <IconButton label={`Remove ${file.name}`} small onClick={() => onRemove(index)}>
              <X />
            </IconButton>
          )}
        </li>
      ))}
    </ul>
  );
}
