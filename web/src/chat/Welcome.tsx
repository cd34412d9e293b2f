import { MessageSquare } from "lucide-react";
import { ApiError } from "../api/client";
import { keyWanted } from "../api/key";
import { useServerInfo } from "../api/manage";
import { findSight, isDemo, nameModel, useModels } from "../api/models";
import { routeHref } from "../lib/route";
import { Button } from "../ui/Button";
import { Empty, Notice } from "../ui/Notice";
import { listQuestions } from "./questions";
import styles from "./Welcome.module.css";

function Problem({ error }: { error: Error }) {
  if (error instanceof ApiError && error.status === 0) return null; // the whole page says that the server is away
  if (!(error instanceof ApiError && error.status === 401)) return <Notice kind="error">{error.message}</Notice>;
  return (
    <Notice kind="warning" actions={<Button onClick={() => keyWanted.set("offered")}>Enter a key</Button>}>
      This server wants an API key.
    </Notice>
  );
}

interface Props {
  model: string;
  /** Whether a folder is not ready, or a question is looked up already. */
  isBusy: boolean;
  onAsk: (text: string) => void;
}

/** An empty conversation: what this is, and questions that a click asks. */
export function Welcome({ model, isBusy, onAsk }: Props) {
  const models = useModels();
  const usual = useServerInfo().data?.default_model ?? "";
  const name = model || usual;
  const sees = findSight(models.data, name) === true;
  if (models.data?.length === 0)
    return (
      <Empty title="There is no model yet">
        <p>Pull one or import a file first.</p>
        <a href={routeHref("models")}>Go to the models</a>
      </Empty>
    );
  return (
    <Empty title="What would you like to know?" icon={<MessageSquare className={styles.icon} aria-hidden="true" />}>
      {name && (
        <p>
          You talk to <strong>{nameModel(name)}</strong>, on the computer that this page comes from. What you write
          stays there and in this browser.
        </p>
      )}
      {isDemo(name) && (
        <p>
          This small model knows Python's standard library and nothing else.{" "}
          <a href={routeHref("models")}>Get one for everyday questions</a>
        </p>
      )}
      <p>
        {sees ? "Pictures, text files and PDFs" : "Text files and PDFs"} can be added to a message, and folders to a
        chat.
        <span className={styles.keys}>
          {" "}
          <kbd>?</kbd> shows the keyboard shortcuts.
        </span>
      </p>
      {models.error && <Problem error={models.error} />}
      <ul className={styles.questions} aria-label="Questions to begin with">
        {listQuestions(name).map((question) => (
          <li key={question}>
            <Button className={styles.question ?? ""} disabled={isBusy} onClick={() => onAsk(question)}>
              {question}
            </Button>
          </li>
        ))}
      </ul>
    </Empty>
  );
}
