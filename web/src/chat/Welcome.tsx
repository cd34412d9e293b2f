import { MessageSquare } from "lucide-react";
import { ApiError } from "../api/client";
import { keyWanted } from "../api/key";
import { useServerInfo } from "../api/manage";
import { nameModel, useModels } from "../api/models";
import { routeHref } from "../lib/route";
import { Button } from "../ui/Button";
import { Empty, Notice } from "../ui/Notice";
import styles from "./Welcome.module.css";

/** The demo model knows Python's library and little else. */
const FOR_DEMO = ["What does os.path.join do?", "How do I read a file line by line?", "What does itertools.chain do?"];
const FOR_OTHERS = [
  "Write a Python function that merges two sorted lists.",
  "Explain recursion with a short example.",
  "Compare TCP and UDP in a table.",
];

function Problem({ error }: { error: Error }) {
  if (error instanceof ApiError && error.status === 0) return null; // the whole page says that the server is away
  if (!(error instanceof ApiError && error.status === 401)) return <Notice kind="error">{error.message}</Notice>;
  return (
    <Notice kind="warning" actions={<Button onClick={() => keyWanted.set("offered")}>Enter a key</Button>}>
      This server wants an API key.
    </Notice>
  );
}

/** An empty conversation: what this is, and questions that a click asks. */
export function Welcome({ model, onAsk }: { model: string; onAsk: (text: string) => void }) {
  const models = useModels();
  const usual = useServerInfo().data?.default_model ?? "";
  const name = model || usual;
  if (models.data?.length === 0)
    return (
      <Empty title="There is no model yet">
        <p>Pull one or import a file first.</p>
        <a href={routeHref("models")}>Go to the models</a>
      </Empty>
    );
  return (
    <Empty title="What would you like to know?" icon={<MessageSquare className={styles.icon} aria-hidden="true" />}>
      {name && <p>{nameModel(name)} answers.</p>}
      <p>
        The model runs where this page comes from. Conversations stay in this browser. Text files and PDFs can be
        dropped here, pictures too where the model sees, and <kbd>?</kbd> shows the keyboard shortcuts.
      </p>
      {models.error && <Problem error={models.error} />}
      <ul className={styles.questions} aria-label="Questions to begin with">
        {(name.startsWith("demo") ? FOR_DEMO : FOR_OTHERS).map((question) => (
          <li key={question}>
            <Button className={styles.question ?? ""} onClick={() => onAsk(question)}>
              {question}
            </Button>
          </li>
        ))}
      </ul>
    </Empty>
  );
}
