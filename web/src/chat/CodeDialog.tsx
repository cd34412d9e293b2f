import { Tabs } from "radix-ui";
import { useState } from "react";
import { apiKey } from "../api/key";
import { useSampling } from "../api/sampling";
import { useStore } from "../lib/store";
import { CodeBlock } from "../ui/CodeBlock";
import { Dialog } from "../ui/Dialog";
import { Notice } from "../ui/Notice";
import styles from "./CodeDialog.module.css";
import { cutPictures, LANGUAGES, type Language, writeCode } from "./code";
import type { Conversation } from "./types";
import { useThread } from "./useThread";
import { writeRequest } from "./wire";

/** How a program asks what this conversation asked last, with its settings. */
export default function CodeDialog({ conversation, onClose }: { conversation: Conversation; onClose: () => void }) {
  const [language, setLanguage] = useState<Language>("curl");
  const needsKey = useStore(apiKey) !== "";
  const path = useThread(conversation.id)?.path ?? [];
  const usual = useSampling(conversation.settings.model);
  const asked = path.slice(0, path.findLastIndex((message) => message.role === "user") + 1);
  const write = () => {
    const { settings } = conversation;
    const { seed, ...body } = writeRequest(asked, settings, settings.seed ?? 0, false, usual);
    return { ...body, ...(settings.seed !== null && { seed }) };
  };
  return (
    <Dialog open wide title="View code" onClose={onClose}>
      <p>The request of the last question in this conversation, for any client of OpenAI&apos;s API.</p>
      <Tabs.Root value={language} onValueChange={(value) => setLanguage(value as Language)}>
        <Tabs.List aria-label="Language" className={styles.tabs ?? ""}>
          {Object.entries(LANGUAGES).map(([name, label]) => (
            <Tabs.Trigger key={name} value={name} className={styles.tab ?? ""}>
              {label}
            </Tabs.Trigger>
          ))}
        </Tabs.List>
        <Tabs.Content value={language}>
          <Code write={() => writeCode(language, write(), location.origin, needsKey)} language={language} />
        </Tabs.Content>
      </Tabs.Root>
    </Dialog>
  );
}

function Code({ write, language }: { write: () => string; language: Language }) {
  try {
    const code = write();
    const shown = cutPictures(code);
    return (
      <>
        {shown !== code && <p>Pictures are shown by their beginnings; Copy and Download give them whole.</p>}
        <CodeBlock code={code} shown={shown} language={language === "curl" ? "bash" : language} />
      </>
    );
  } catch (error) {
    return <Notice kind="error">{error instanceof Error ? error.message : String(error)}</Notice>;
  }
}
